"""The commands, as users call them: results, exit codes, and the errors a user will make."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import offset_runtime
from offset_runtime import DomainOffset, ModelSpec, OffsetStore, models
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.cli import app
from offset_runtime.errors import OffsetFileError

MakeOffset = Callable[..., DomainOffset]

TEXTS = ["The court held that the clause applies.", "The appeal is dismissed with costs.", "Judgment is reserved."]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def failed(*arguments: object) -> str:
    """Run a command that must end as a user's error; return its message."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "offset_runtime", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def store(tmp_path: Path, make_offset: MakeOffset) -> Path:
    """A store of two offsets for the fake base model."""
    offsets = OffsetStore(tmp_path / "offsets")
    metrics = {"gain_percent": 17.25, "retention": {"kl": 0.031}}
    offsets.put(replace(make_offset(FakeBackend().identity, "legal", seed=1), metrics=metrics))
    offsets.put(make_offset(FakeBackend().identity, "code", seed=2, anchor="sequence", prompt_format="raw"))
    return offsets.root


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "legal.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def tiny_folder(tmp_path: Path, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Path:
    """A folder as transformers saves it, with a tiny model that can chat."""
    make_model("llama", max_position_embeddings=512).save_pretrained(tmp_path / "tiny")
    make_tokenizer(chat=True).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def many_docs(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"{text} Case {i}."}) + "\n" for i in range(4) for text in TEXTS))
    return path


# train


def test_train_writes_an_offset_and_reports_gain_with_retention(
    tiny_folder: Path, many_docs: Path, tmp_path: Path
) -> None:
    settings = ("--steps", 2, "--max-tokens", 16, "-k", 2, "--retention-weight", 0)
    result = run("train", "legal", "-m", tiny_folder, "--docs", many_docs, "-s", tmp_path / "new", *settings)
    assert result.exit_code == 0, result.output
    assert "gain" in result.stdout
    assert "KL" in result.stdout
    offset = OffsetStore(tmp_path / "new").get("legal")
    assert offset.tensor.shape == (2, 32)
    assert {"gain_percent", "retention"} <= offset.metrics.keys()


def test_train_json_is_one_object(tiny_folder: Path, many_docs: Path, tmp_path: Path) -> None:
    arguments = ("--docs", many_docs, "-s", tmp_path / "new", "--recipe", "paper", "--steps", 2, "--json")
    result = run("train", "legal", "-m", tiny_folder, *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["prompt_format"], found["anchor"], found["positions"]) == ("raw", "sequence", 1)
    assert found["training"]["retention_weight"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--format", "chatt"), "--format chatt: Input should be 'raw', 'bos' or 'chat'"),
        (("--anchor", "end"), "--anchor end: Input should be 'sequence' or 'turn'"),
        (("--positions", 0), "--positions 0"),
        (("--recipe", "papr"), "did you mean 'paper'?"),
        (("--docs", "nowhere"), "no file or folder nowhere"),
        (("--validation", "nowhere"), "no file or folder nowhere"),
        (("--model", "nowhere"), "no model 'nowhere'"),
        (("--model", "fake"), "training needs the torch backend"),
        (
            ("--backend", "llama_cpp"),
            "training needs the torch backend, found --backend llama_cpp; leave --backend out",
        ),
    ],
)
def test_train_refuses_what_it_cannot_use(
    many_docs: Path, tmp_path: Path, arguments: tuple[object, ...], named: str
) -> None:
    start = ("train", "legal", "--model", "fake", "--docs", many_docs, "--store", tmp_path / "new")
    assert named in failed(*start, *arguments)
    assert not (tmp_path / "new").exists()


def test_train_runs_on_torch_for_a_gguf_file_too(
    many_docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    specs: list[ModelSpec] = []
    monkeypatch.setattr(models, "load_backend", lambda spec: specs.append(spec) or FakeBackend())

    failed("train", "legal", "-m", model, "--docs", many_docs, "--store", tmp_path / "new")

    assert specs == [ModelSpec(base=str(model), backend="torch")]


def test_train_refuses_a_store_that_cannot_be_written_before_the_work(many_docs: Path) -> None:
    message = failed("train", "legal", "-m", "nowhere", "--docs", many_docs, "--store", many_docs / "new")
    assert f"{many_docs} is no folder" in message


def test_an_offset_that_cannot_be_stored_after_training_is_not_lost(
    tiny_folder: Path, many_docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(store: OffsetStore, offset: DomainOffset) -> Path:
        raise OffsetFileError("the disk is full")

    monkeypatch.setattr(OffsetStore, "put", full)
    settings = ("--steps", 1, "--max-tokens", 16, "--retention-weight", 0, "-s", tmp_path / "new")

    message = failed("train", "legal", "-m", tiny_folder, "--docs", many_docs, *settings)

    assert "the disk is full" in message
    assert DomainOffset.load(message.split(" it is in ")[1].strip()).domain == "legal"


def test_train_refuses_a_domain_that_names_no_file(many_docs: Path) -> None:
    assert "'../legal' cannot name a file" in failed("train", "../legal", "-m", "fake", "--docs", many_docs)


# eval


def test_eval_prints_tables(store: Path, docs: Path) -> None:
    result = run("eval", "--model", "fake", "--store", store, "--docs", f"legal={docs}", "--max-tokens", 16)
    assert result.exit_code == 0, result.output
    for title in ("Gain and retention", "Gain %", "Cross-entropy"):
        assert title in result.stdout


def test_eval_json_is_the_documented_object_alone(store: Path, docs: Path) -> None:
    result = run("eval", "-m", "fake", "-s", store, "--docs", f"legal={docs}", "--max-tokens", 16, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"domains", "matrix", "by_position"} <= found.keys()
    assert {"perplexity_without", "perplexity_with", "gain_percent", "retention"} <= found["domains"]["legal"].keys()
    assert found["domains"]["legal"]["retention"].keys() == {
        "kl",
        "reply_perplexity_without",
        "reply_perplexity_with",
    }
    assert found["matrix"]["legal"].keys() == {"legal", "code"}


def test_eval_takes_several_domains_and_several_sources_a_domain(store: Path, docs: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("A further judgment, of the same court.")
    arguments = ["--docs", f"legal={docs}", "--docs", f"code={docs}", "--docs", f"legal={more}"]
    result = run("eval", "-m", "fake", "-s", store, *arguments, "--max-tokens", 8, "--json")
    found = json.loads(result.stdout)
    assert {name: domain["documents"] for name, domain in found["domains"].items()} == {"legal": 4, "code": 3}


def test_eval_draws_a_plot_beside_the_result(store: Path, docs: Path, tmp_path: Path) -> None:
    target = tmp_path / "gain.svg"
    result = run("eval", "-m", "fake", "-s", store, "--docs", f"legal={docs}", "--max-tokens", 8, "--plot", target)
    assert result.exit_code == 0, result.output
    assert target.read_text().lstrip().startswith("<?xml")


def test_eval_says_on_standard_error_what_was_left_out(store: Path, docs: Path) -> None:
    with docs.open("a") as stream:
        stream.write('{"text": "Hm."}\n{"text": "The appeal is dismissed with costs."}\n')
    result = run("eval", "-m", "fake", "-s", store, "--docs", f"legal={docs}", "--max-tokens", 8, "--json")
    json.loads(result.stdout)
    said = " ".join(result.stderr.split())
    assert "1 duplicated" in said
    assert "left out 1 too short of 4 documents" in said


def test_eval_of_a_domain_without_offset_names_the_nearest(store: Path, docs: Path) -> None:
    message = failed("eval", "-m", "fake", "-s", store, "--docs", f"legl={docs}")
    assert message == (f"error: unknown domain 'legl' in {store}; known domains: code, legal; did you mean 'legal'?\n")


@pytest.mark.parametrize("option", ["test.jsonl", "=test.jsonl", "legal="])
def test_eval_documents_without_a_domain_say_what_is_expected(store: Path, option: str) -> None:
    assert "expected DOMAIN=PATH, for example legal=test.jsonl" in failed(
        "eval", "-m", "fake", "-s", store, "--docs", option
    )


def test_eval_of_missing_empty_or_malformed_documents_names_file_and_line(store: Path, tmp_path: Path) -> None:
    def message(source: Path) -> str:
        return failed("eval", "-m", "fake", "-s", store, "--docs", f"legal={source}")

    assert f"no file or folder {tmp_path / 'nowhere.jsonl'}" in message(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty").mkdir()
    assert f"no documents in {tmp_path / 'empty'}" in message(tmp_path / "empty")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert f"{tmp_path / 'bad.jsonl'}, line 2: not JSON" in message(tmp_path / "bad.jsonl")


def test_eval_to_another_kind_of_plot_fails_before_the_model_is_loaded(store: Path, docs: Path) -> None:
    message = failed("eval", "-m", "no-such-model", "-s", store, "--docs", f"legal={docs}", "--plot", "gain.pdf")
    assert "found suffix '.pdf', expected .png or .svg" in message


def test_an_unknown_model_names_what_there_is(store: Path, docs: Path) -> None:
    message = failed("eval", "-m", "no-such-model", "-s", store, "--docs", f"legal={docs}")
    assert "no model 'no-such-model'" in message
    assert "smollm2-135m" in message


def test_an_unknown_backend_names_the_known_ones(store: Path, docs: Path) -> None:
    result = run("eval", "-m", "fake", "--backend", "tpu", "-s", store, "--docs", f"legal={docs}")
    assert result.exit_code == 2
    assert "'tpu' is not one of auto, torch, llama_cpp," in " ".join(result.stderr.split())


def test_an_offset_of_another_model_is_refused_by_name(store: Path, docs: Path, make_offset: MakeOffset) -> None:
    foreign = FakeBackend().identity.model_copy(update={"architecture": "llama"})
    OffsetStore(store).put(make_offset(foreign, "legal"))
    for command in (["eval", "--docs", f"legal={docs}"], ["score", "--domain", "legal", docs]):
        message = failed(*command, "-m", "fake", "-s", store)
        assert "the offset of domain 'legal' was made for another base model: architecture llama" in message


def test_conversations_for_a_raw_offset_say_which_format_they_need(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "What is it?", "completion": "It is a lamp."}) + "\n")
    message = failed("eval", "-m", "fake", "-s", store, "--docs", f"code={path}")
    assert "conversations can only be laid out in format 'chat', not 'raw'" in message


# score


def test_score_ranks_all_domains_beside_the_base(store: Path, docs: Path) -> None:
    result = run("score", "-m", "fake", "-s", store, docs, "--json")
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)["scores"]
    assert sorted(str(score["domain"]) for score in scores) == ["None", "None", "code", "legal"]
    differences = [score["difference_per_token"] for score in scores]
    assert differences == sorted(differences, reverse=True)
    for score in scores:
        assert score["logprob_per_token"] == pytest.approx(score["logprob"] / score["tokens"])


def test_score_under_one_domain_prints_a_table(store: Path, tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text(TEXTS[0])
    result = run("score", "-m", "fake", "-s", store, "--domain", "legal", letter)
    assert result.exit_code == 0, result.output
    assert "legal" in result.stdout
    assert "plain base" in result.stdout
    assert "code" not in result.stdout


def test_score_errors_name_domain_store_file_and_context(store: Path, docs: Path, tmp_path: Path) -> None:
    assert "did you mean 'legal'" in failed("score", "-m", "fake", "-s", store, "--domain", "legale", docs)
    assert "no offsets in" in failed("score", "-m", "fake", "-s", tmp_path / "none", docs)
    assert "no file or folder" in failed("score", "-m", "fake", "-s", store, tmp_path / "none.txt")
    long = tmp_path / "long.txt"
    long.write_text("word " * 2000)
    assert "exceeds the context of 4096 tokens" in failed("score", "-m", "fake", "-s", store, "-d", "legal", long)
    assert "exceeds the context of 4096 tokens" in failed("score", "-m", "fake", "-s", store, "-d", "code", long)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    assert "holds conversations" in failed("score", "-m", "fake", "-s", store, chats)


# list, show, verify


def test_list_shows_the_offsets_of_a_store(store: Path) -> None:
    result = run("list", "--store", store)
    assert result.exit_code == 0
    for text in ("legal", "+17.2", "0.031", "code"):
        assert text in result.stdout


def test_list_json_has_an_object_an_offset(store: Path) -> None:
    found = json.loads(run("list", "--store", store, "--json").stdout)
    assert [offset["domain"] for offset in found["offsets"]] == ["code", "legal"]
    assert found["offsets"][1]["gain_percent"] == 17.25
    assert found["unusable"] == []


def test_list_shows_the_others_when_a_file_is_damaged_and_ends_with_2(store: Path) -> None:
    (store / "bad.safetensors").write_bytes(b"x")
    result = run("list", "--store", store)
    assert result.exit_code == 2
    assert "legal" in result.stdout
    assert f"cannot use offset file {store / 'bad.safetensors'}: it is truncated" in result.stderr


def test_list_of_a_missing_store_says_how_to_get_one(tmp_path: Path) -> None:
    message = failed("list", "--store", tmp_path / "nowhere")
    assert "there is no such folder" in message
    assert "offset-runtime train" in message


@pytest.mark.parametrize("by_file", [False, True])
def test_show_prints_every_field_of_a_domain_or_a_file(store: Path, by_file: bool) -> None:
    name = store / "legal.safetensors" if by_file else "legal"
    found = json.loads(run("show", name, "--store", store, "--json").stdout)
    assert found["metrics"]["retention"] == {"kl": 0.031}
    assert found["base"]["architecture"] == "fake"
    assert "metrics.retention.kl" in run("show", name, "--store", store).stdout


def test_show_of_an_unknown_domain_or_a_missing_file_says_so(store: Path) -> None:
    assert "did you mean 'legal'" in failed("show", "legale", "--store", store)
    assert f"no offset file at {store / 'none.safetensors'}" in failed("show", store / "none.safetensors")
    assert "cannot name a file" in failed("show", "../legal", "--store", store)


def test_verify_accepts_a_good_store_and_good_files(store: Path) -> None:
    assert run("verify", "--store", store).exit_code == 0
    result = run("verify", store / "legal.safetensors", store / "code.safetensors", "--model", "fake", "--json")
    assert result.exit_code == 0, result.output
    assert [entry["ok"] for entry in json.loads(result.stdout)["files"]] == [True, True]


def test_verify_reports_every_failure_and_ends_with_2(store: Path, make_offset: MakeOffset) -> None:
    (store / "bad.safetensors").write_bytes(b"x")
    foreign = FakeBackend().identity.model_copy(update={"architecture": "llama"})
    OffsetStore(store).put(make_offset(foreign, "news"))
    result = run("verify", "--store", store, "--model", "fake", "--json")
    assert result.exit_code == 2
    files = json.loads(result.stdout)["files"]
    assert {Path(entry["path"]).stem: entry["ok"] for entry in files} == {
        "bad": False,
        "code": True,
        "legal": True,
        "news": False,
    }
    table = run("verify", "--store", store, "--model", "fake")
    assert table.exit_code == 2
    assert table.stdout.count("failed") == 2


def test_verify_of_a_missing_file_fails(tmp_path: Path) -> None:
    result = run("verify", tmp_path / "none.safetensors")
    assert result.exit_code == 2
    assert "no offset file at" in " ".join(result.stdout.split())


# the whole


def command_lines(command: Any) -> list[list[str]]:
    """The words of every command below `command`, those of groups and of lazy imports included."""
    lines = []
    for name, below in getattr(command, "commands", {}).items():
        loaded = below.make_context(name, [], resilient_parsing=True).command
        lines += [[name, *rest] for rest in command_lines(loaded) or [[]]]
    return lines


def test_every_command_has_help_with_an_example() -> None:
    commands = command_lines(typer.main.get_command(app))
    assert {"train", "verify", "run", "graph draw"} <= {" ".join(words) for words in commands}
    for words in commands:
        result = run(*words, "--help")
        assert result.exit_code == 0, words
        shown = " ".join(result.stdout.split())
        assert f"Example: offset-runtime {' '.join(words)} " in shown, words


def test_a_misspelled_command_names_the_nearest() -> None:
    result = run("evaluat")
    assert result.exit_code == 2
    assert "eval" in result.stderr


def test_the_model_is_freed_after_a_command(store: Path, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FakeBackend, "close", lambda self: closed.append(self.open_sequences))
    run("eval", "-m", "fake", "-s", store, "--docs", f"legal={docs}", "--max-tokens", 8)
    assert closed == [0]


def test_an_unexpected_error_and_an_interrupt_end_without_a_traceback(
    store: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["eval", "-m", "fake", "-s", store, "--docs", f"legal={docs}"]
    for error, code, word in ((RuntimeError("boom"), 1, "internal error"), (KeyboardInterrupt(), 130, "interrupted")):

        def fail(self: FakeBackend, chunks: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(FakeBackend, "forward", fail)
        result = run(*arguments)
        assert result.exit_code == code
        assert result.stderr.startswith(word)
        assert "Traceback" not in result.stderr


def test_the_version_is_printed_by_the_module_too() -> None:
    result = fresh("--version")
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        f"offset-runtime {offset_runtime.__version__}\n",
        "",
    )


def test_an_error_in_a_process_of_its_own_has_exit_code_2_and_no_traceback(tmp_path: Path) -> None:
    result = fresh("show", str(tmp_path / "none.safetensors"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: no offset file at")


def test_commands_that_need_no_model_load_no_model_library(store: Path) -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from offset_runtime.cli import app\n"
        f"for command in (['--help'], ['list', '-s', {str(store)!r}], ['show', 'legal', '-s', {str(store)!r}]):\n"
        "    assert CliRunner().invoke(app, command).exit_code == 0, command\n"
        "heavy = {'torch', 'transformers', 'langchain_core', 'langgraph', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.real_model
@pytest.mark.parametrize("backend", ["torch", "llama_cpp"])
def test_loading_a_real_model_writes_nothing_of_the_libraries_to_the_terminal(
    backend: str, tmp_path: Path, make_offset: MakeOffset
) -> None:
    path = make_offset(FakeBackend().identity, "legal").save(tmp_path / "legal.safetensors")
    result = fresh("verify", str(path), "--model", "smollm2-135m", "--backend", backend, "--json")
    assert result.returncode == 2, result.stderr
    [entry] = json.loads(result.stdout)["files"]
    assert "another base model: architecture fake (this model: llama)" in entry["problem"]
    # The one line that may be here says that the model was converted, the first time it is used.
    assert [line for line in result.stderr.splitlines() if "convert" not in line and "later loads" not in line] == []
