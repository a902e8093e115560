"""Reading workflow files: what a user gets to read when one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offset_runtime import LlamaCppOptions, ModelSpec
from offset_runtime.errors import WorkflowError
from offset_runtime.graphs.loader import load_workflow, read_workflow

GOOD = """
    version: 1
    name: newsroom
    model: {base: fake}
    agents:
      reporter: {system_prompt: Write., max_tokens: 8}
    edges:
      - {source: START, target: reporter}
      - {source: reporter, target: END}
"""

Write = Callable[[str], Path]


def problems(path: Path) -> list[str]:
    """The lines of the error that reading `path` raises, without the path."""
    with pytest.raises(WorkflowError) as caught:
        read_workflow(path)
    lines = str(caught.value).split("\n")
    assert all(str(path) in line for line in lines), "every line names the file"
    return [line.replace(f"{path}, ", "") for line in lines]


def with_line(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_good_file_is_read(write_workflow: Write) -> None:
    workflow = read_workflow(write_workflow(GOOD))
    assert list(workflow.agents) == ["reporter"]
    assert workflow.agents["reporter"].max_tokens == 8
    assert workflow.model.spec().base == "fake"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("model:", "modle:", "line 3: unknown key 'modle'; did you mean 'model'?"),
        (
            "{base: fake}",
            "{base: fake, devise: cpu}",
            "line 3: unknown key 'devise' in 'model'; did you mean 'device'?",
        ),
        (
            "{base: fake}",
            "\n      base: fake\n      llama_cpp:\n        n_cxt: 4096",
            "line 6: unknown key 'n_cxt' in 'model.llama_cpp'; did you mean 'n_ctx'?",
        ),
        (
            "system_prompt",
            "sytem_prompt",
            "line 5: unknown key 'sytem_prompt' in agent 'reporter'; did you mean 'system_prompt'?",
        ),
        ("target: END", "tagret: END", "line 8: unknown key 'tagret' in edge 2; did you mean 'target'?"),
        ("{source: START,", "{form: START,", "line 7: unknown key 'form' in edge 1; did you mean 'from'?"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(
    write_workflow: Write, old: str, new: str, expected: str
) -> None:
    assert expected in problems(write_workflow(with_line(old, new)))


def test_an_unknown_key_like_no_other_lists_the_known_ones(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("name: newsroom", "name: newsroom\n    qqq: 1")))
    assert problem.startswith("line 3: unknown key 'qqq'; known keys: version, name, description, model, domains")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_tokens: 8", "max_tokens: true", "expected a whole number for 'agents.reporter.max_tokens'; found True"),
        ("max_tokens: 8", "max_tokens: 8.5", "expected a whole number for 'agents.reporter.max_tokens'; found 8.5"),
        ("max_tokens: 8", "max_tokens: -1", "greater than or equal to 0 for 'agents.reporter.max_tokens'; found -1"),
        ("max_tokens: 8", "temperature: hot", "expected a number for 'agents.reporter.temperature'; found 'hot'"),
        ("max_tokens: 8", "strength: .nan", "expected a finite number for 'agents.reporter.strength'; found nan"),
        ("max_tokens: 8", "temperature: .inf", "expected a finite number for 'agents.reporter.temperature'; found inf"),
        ("max_tokens: 8", 'stop: [".", ""]', "'agents.reporter.stop': a stop string must not be empty"),
        ("Write.", "12", "expected text for 'agents.reporter.system_prompt'; found 12"),
    ],
)
def test_a_wrong_type_is_named_with_what_was_found_and_expected(
    write_workflow: Write, old: str, new: str, expected: str
) -> None:
    [problem] = problems(write_workflow(with_line(old, new)))
    assert problem.startswith("line 5: ")
    assert expected in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{n_ctx: many}", "expected a whole number for 'model.llama_cpp.n_ctx'; found 'many'"),
        ("{n_ctx: true}", "expected a whole number for 'model.llama_cpp.n_ctx'; found True"),
        ("{n_ctx: 0}", "expected greater than or equal to 1 for 'model.llama_cpp.n_ctx'; found 0"),
        ("{use_mlock: 1}", "expected true or false for 'model.llama_cpp.use_mlock'; found 1"),
        ("{type_k: q9}", "or 'q4_0' for 'model.llama_cpp.type_k'; found 'q9'"),
        ("{type_v: q8_0, flash_attn: false}", "'model.llama_cpp': type_v=q8_0 needs flash attention"),
        ("4096", "expected a mapping (key: value) for 'model.llama_cpp'; found 4096"),
    ],
)
def test_an_option_of_llama_cpp_is_named_with_what_was_found_and_expected(
    write_workflow: Write, options: str, expected: str
) -> None:
    [problem] = problems(write_workflow(with_line("{base: fake}", f"{{base: fake, llama_cpp: {options}}}")))
    assert problem.startswith("line 3: ")
    assert expected in problem


def test_an_agent_without_a_body_is_named(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("reporter: {system_prompt: Write., max_tokens: 8}", "reporter:")))
    assert problem == "line 5: expected a mapping (key: value) for 'agents.reporter'; found nothing"


def test_missing_keys_are_all_named(write_workflow: Write) -> None:
    assert problems(write_workflow("version: 1\nname: x\nagents: {a: {}}\n")) == [
        "line 1: missing key 'model'",
        "line 1: missing key 'edges'",
    ]


def test_an_edge_without_a_target_says_what_an_edge_needs(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("{source: reporter, target: END}", "{source: reporter}")))
    assert problem == "line 8: edge 2: found no 'target'; expected 'target', or 'path' or 'route' with 'targets'"


def test_an_edge_with_both_kinds_of_target_is_refused(write_workflow: Write) -> None:
    both = "{source: reporter, target: END, path: a:b, targets: {x: END}}"
    [problem] = problems(write_workflow(with_line("{source: reporter, target: END}", both)))
    assert problem == "line 8: edge 2: found 'target' beside 'path' or 'targets'; an edge has either"


def test_two_spellings_of_one_key_are_refused(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("{source: START,", "{source: START, from: START,")))
    assert problem == "line 7: key 'from' in edge 1 is there twice under two spellings; keep one"


def test_an_unsupported_version_is_named(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("version: 1", "version: 2")))
    assert problem == "line 1: unsupported version 2; this release reads version 1"


def test_a_name_that_yaml_reads_as_a_truth_value_is_to_be_quoted(write_workflow: Write) -> None:
    text = with_line("target: END", "path: reply_contains, targets: {true: END, '*': END}")
    [problem] = problems(write_workflow(text))
    assert problem.startswith("line 8: expected a name as text in 'edges[1].targets'; found True; put it in quotes")


def test_yes_no_on_and_off_are_text(write_workflow: Write) -> None:
    text = with_line("target: END", "path: reply_contains, targets: {yes: off, no: END, '*': END}")
    text = text.replace("    edges:", "      off: {}\n    edges:\n      - {from: off, to: END}")
    workflow = read_workflow(write_workflow(text))
    assert workflow.edges[2].targets == {"yes": "off", "no": "END", "*": "END"}
    assert list(workflow.agents) == ["reporter", "off"]


def test_an_agent_name_with_a_space_is_refused(write_workflow: Write) -> None:
    found = problems(write_workflow(with_line("      reporter:", "      our reporter:")))
    assert found == [
        "line 5: name 'our reporter' cannot name an agent; use letters, digits, '_' and '-', starting with a letter"
    ]


def test_a_repeated_key_is_an_error_and_not_the_last_one_taken(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("name: newsroom", "name: newsroom\n    name: paper")))
    assert problem == "line 3: key 'name' is there twice (first in line 2); keep one"


def test_a_repeated_agent_is_an_error(write_workflow: Write) -> None:
    [problem] = problems(write_workflow(with_line("    edges:", "      reporter: {}\n    edges:")))
    assert problem == "line 6: key 'reporter' is there twice (first in line 5); keep one"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\nname: note: this\n", "line 2: not valid YAML: mapping values are not allowed here; put text"),
        ("version: 1\n\tname: x\n", "line 2: not valid YAML: while scanning for the next token found character '\\t'"),
        ("a: [1, 2\nb: 3\n", "line 2: not valid YAML: while parsing a flow sequence"),
        ("a: !!python/object:os.system {}\n", "line 1: not valid YAML: could not determine a constructor for the tag"),
        ("? [a]\n: 1\n", "line 1: a key must be text, not a list or a mapping"),
        ("a: 1\n---\nb: 2\n", "line 2: not valid YAML: expected a single document"),
    ],
)
def test_what_is_no_yaml_is_named_with_its_line(write_workflow: Write, text: str, expected: str) -> None:
    [problem] = problems(write_workflow(text))
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; expected keys such as 'version', 'model' and 'agents'"),
        ("- 1\n", "line 1: expected keys such as 'version', 'model' and 'agents'; found [1]"),
        ("a: 2020-99-99\n", "not valid YAML: month must be in 1..12"),
        ('a: "\x01"\n', "not valid YAML: unacceptable character"),
        ("[" * 5000, "nested too deeply for a workflow file"),
    ],
)
def test_a_file_that_is_no_workflow_is_refused(write_workflow: Write, text: str, expected: str) -> None:
    path = write_workflow(text)
    with pytest.raises(WorkflowError) as caught:
        read_workflow(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_an_alias_that_contains_itself_is_no_endless_loop(write_workflow: Write) -> None:
    assert "line 1: unknown key 'a'; known keys:" in "\n".join(problems(write_workflow("a: &a [*a]\n")))


def test_merged_keys_are_read(write_workflow: Write) -> None:
    text = with_line(
        "{system_prompt: Write., max_tokens: 8}", "&base {max_tokens: 8}\n      other: {<<: *base, top_k: 3}"
    )
    assert read_workflow(write_workflow(text)).agents["other"].max_tokens == 8


def test_a_missing_file_is_named_with_the_nearest_one(write_workflow: Write) -> None:
    path = write_workflow(GOOD)
    wrong = path.with_name("workflw.yaml")
    with pytest.raises(WorkflowError) as caught:
        load_workflow(wrong)
    assert str(caught.value) == f"no workflow file {wrong}; did you mean 'workflow.yaml'?"


def test_a_folder_is_no_workflow(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="is a folder; expected a workflow file in YAML"):
        load_workflow(tmp_path)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "workflow.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(WorkflowError, match="is not in UTF-8"):
        load_workflow(path)


def test_paths_are_relative_to_the_file_and_not_to_the_working_folder(
    write_workflow: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = with_line(
        "{base: fake}", "{base: ./models/x.gguf}\n    domains: {news: offsets/n.safetensors}\n    store: offsets"
    )
    path = write_workflow(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    workflow = read_workflow(path)
    assert Path(workflow.domains["news"]) == tmp_path / "offsets" / "n.safetensors"
    assert workflow.store is not None
    assert Path(workflow.store) == tmp_path / "offsets"
    assert Path(workflow.model.base) == tmp_path / "models" / "x.gguf"


def test_a_models_name_is_left_as_it_is(write_workflow: Write) -> None:
    workflow = read_workflow(write_workflow(with_line("{base: fake}", "{base: smollm2-135m}")))
    assert workflow.model.base == "smollm2-135m"


def test_backend_and_options_of_llama_cpp_are_read(write_workflow: Write) -> None:
    model = "{base: fake, backend: llama_cpp, llama_cpp: {n_ctx: 4096, type_k: q8_0}}"
    spec = read_workflow(write_workflow(with_line("{base: fake}", model))).model.spec()
    assert spec == ModelSpec(base="fake", backend="llama_cpp", llama_cpp=LlamaCppOptions(n_ctx=4096, type_k="q8_0"))


def test_a_key_of_the_workflow_in_an_agent_is_pointed_to_its_place(write_workflow: Callable[[str], Path]) -> None:
    path = write_workflow("""
        version: 1
        name: w
        model: {base: fake}
        agents:
          a: {history: shared}
        edges:
          - {source: START, target: a}
          - {source: a, target: END}
    """)
    with pytest.raises(WorkflowError, match=r"line 5: unknown key 'history' in agent 'a'; it is a key of the workflow"):
        read_workflow(path)
