"""The commands `run`, `graph check` and `graph draw`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offset_runtime.cli import app
from offset_runtime.graphs import AgentFinished, commands

Write = Callable[[str], Path]

GOOD = """
    version: 1
    name: newsroom
    model: {base: fake}
    agents:
      writer: {max_tokens: 5}
      editor: {max_tokens: 5}
    edges:
      - {source: START, target: writer}
      - {source: writer, target: editor}
      - {source: editor, target: END}
"""


@pytest.fixture
def invoke() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


def test_run_shows_every_agent_and_a_table(write_workflow: Write, invoke: Callable[..., Result]) -> None:
    result = invoke("run", write_workflow(GOOD), "hello")
    assert result.exit_code == 0, result.output
    assert "writer | " in result.output
    assert "editor | " in result.output
    *_, last_row, memory = result.output.splitlines()
    assert last_row.split()[:2] == ["editor", "-"]
    assert "1 base model" in memory
    assert "for 2 agents" in memory


@pytest.mark.parametrize("model", ["{base: fake}", "{base: any, backend: fake}"])
def test_a_workflow_on_the_fake_base_imports_no_model_library(write_workflow: Write, model: str) -> None:
    path = write_workflow(GOOD.replace("{base: fake}", model))
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from offset_runtime.cli import app\n"
        f"assert CliRunner().invoke(app, ['run', {str(path)!r}, 'hello']).exit_code == 0\n"
        "heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_run_json_prints_only_json_lines(write_workflow: Write, invoke: Callable[..., Result]) -> None:
    result = invoke("run", write_workflow(GOOD), "hello", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [r["agent"] for r in records if r["event"] == "agent_finished"] == ["writer", "editor"]
    assert records[-1]["event"] == "workflow_finished"


def test_a_checkpointed_conversation_goes_on(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    def prompt_tokens(*options: str) -> int:
        result = invoke("run", write_workflow(GOOD), "hello", "--json", "--checkpoint", tmp_path / "c.sqlite", *options)
        records = [json.loads(line) for line in result.stdout.splitlines()]
        return next(int(r["usage"]["prompt_tokens"]) for r in records if r["event"] == "agent_finished")

    first = prompt_tokens("--thread", "one")
    assert prompt_tokens("--thread", "one") > first, "the second run has the first in its history"
    assert prompt_tokens("--thread", "two") == first


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "the workflow has no input"),
        ([" "], "the workflow has no input"),
        (["--resume"], "--resume needs --checkpoint FILE"),
        (["hello", "--resume", "--checkpoint", "c"], "leave INPUT out"),
    ],
)
def test_inputs_that_do_not_go_together_end_with_a_message(
    write_workflow: Write, invoke: Callable[..., Result], options: list[str], expected: str
) -> None:
    result = invoke("run", write_workflow(GOOD), *options)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_resuming_what_is_not_there_ends_with_a_message(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    result = invoke("run", write_workflow(GOOD), "--resume", "--checkpoint", tmp_path / "c.sqlite")
    assert result.exit_code == 2
    assert "nothing to resume: there is no thread 'default'" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [("run", "hello"), ("graph", "check"), ("graph", "draw")])
def test_a_faulty_workflow_ends_with_all_its_faults_and_exit_code_2(
    write_workflow: Write, invoke: Callable[..., Result], command: tuple[str, str]
) -> None:
    path = write_workflow(
        GOOD.replace("target: editor", "target: editr").replace("editor: {max", "editor: {domain: x, max")
    )
    arguments = [command[0], path, command[1]] if command[0] == "run" else [*command, path]
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"{path}, line 6: unknown domain 'x' of agent 'editor'" in result.stderr
    assert f"{path}, line 9: edge to unknown agent 'editr'" in result.stderr
    assert "did you mean 'editor'?" in result.stderr


def test_an_offset_of_another_base_stops_run_before_any_agent_speaks(
    write_workflow: Write, invoke: Callable[..., Result], save_offset: Callable[..., Path]
) -> None:
    from offset_runtime.backends.fake import FakeBackend

    save_offset("news", identity=FakeBackend().identity.model_copy(update={"architecture": "llama"}))
    path = write_workflow(
        GOOD.replace("agents:", "domains: {news: offsets/news.safetensors}\n    agents:").replace(
            "editor: {", "editor: {domain: news, "
        )
    )
    for arguments in (["run", path, "hello"], ["graph", "check", path, "--load"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert f"{path}, line 4: the offset of domain 'news' was made for another base model" in result.stderr
        assert "writer" not in result.stdout
    assert invoke("graph", "check", path).exit_code == 0, "without the base this cannot be known"


def test_check_says_what_it_checked(write_workflow: Write, invoke: Callable[..., Result]) -> None:
    path = write_workflow(GOOD)
    found = f"{path}: no problems in 2 agents, 0 domains and 3 edges; history: separate (by its pattern)"
    assert invoke("graph", "check", path).output == f"{found}\n"
    assert invoke("graph", "check", path, "--load").output == f"{found}; all offsets fit fake\n"
    named = write_workflow(GOOD.replace("    agents:", "    history: verbatim\n    agents:"))
    assert "3 edges; history: verbatim\n" in invoke("graph", "check", named).output


def test_draw_prints_mermaid_or_writes_a_picture(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    path = write_workflow(GOOD)
    assert invoke("graph", "draw", path).stdout.startswith("flowchart TD\n")
    picture = tmp_path / "w.png"
    assert invoke("graph", "draw", path, "--output", picture).output == f"wrote {picture}\n"
    assert picture.stat().st_size > 10_000


def test_draw_needs_no_offsets(write_workflow: Write, invoke: Callable[..., Result]) -> None:
    path = write_workflow(
        GOOD.replace("agents:", "domains: {news: offsets/news.safetensors}\n    agents:").replace(
            "editor: {", "editor: {domain: news, "
        )
    )
    assert invoke("graph", "draw", path).exit_code == 0
    result = invoke("run", path, "hello")
    assert result.exit_code == 2
    assert "line 4: domain 'news': no offset file at" in result.stderr


@pytest.mark.parametrize(
    ("thread", "hint"), [("default", "--resume in"), ("my talk", "--resume --thread 'my talk' in")]
)
def test_an_interrupted_run_says_how_to_go_on_once_there_is_a_checkpoint(
    write_workflow: Write,
    invoke: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thread: str,
    hint: str,
) -> None:
    def interrupted(events: Iterable[object], *, after: type | None, **_: object) -> None:
        for event in events if after else ():
            if isinstance(event, after or object):
                raise KeyboardInterrupt
        raise KeyboardInterrupt

    # Long enough that the editor is still writing when the interrupt comes.
    path = write_workflow(GOOD.replace("editor: {max_tokens: 5}", "editor: {max_tokens: 3000}"))
    arguments = ("run", path, "hello", "--checkpoint", tmp_path / "c.sqlite", "--thread", thread)
    monkeypatch.setattr(commands, "show_events", partial(interrupted, after=None))
    early = invoke(*arguments)
    assert early.exit_code == 130
    assert "to go on" not in early.stderr
    monkeypatch.setattr(commands, "show_events", partial(interrupted, after=AgentFinished))
    late = invoke(*arguments)
    assert late.exit_code == 130
    assert f"to go on, run the same command with {hint} place of the input" in late.stderr


def test_max_tokens_that_fill_the_context_stop_run_before_any_agent_speaks(
    write_workflow: Write, invoke: Callable[..., Result]
) -> None:
    path = write_workflow(GOOD.replace("editor: {max_tokens: 5}", "editor: {max_tokens: 4096}"))
    for arguments in (["run", path, "hello"], ["graph", "check", path, "--load"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert f"{path}, line 6: max_tokens of agent 'editor' is 4096" in result.stderr
        assert "writer" not in result.stdout


def test_a_second_input_in_one_thread_is_said_to_continue_it(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    workflow, file = write_workflow(GOOD), tmp_path / "state.db"

    first = invoke("run", workflow, "hello", "--checkpoint", file)
    second = invoke("run", workflow, "again", "--checkpoint", file)
    other = invoke("run", workflow, "again", "--checkpoint", file, "--thread", "new")

    assert [result.exit_code for result in (first, second, other)] == [0, 0, 0]
    assert "continuing thread 'default', which holds 3 messages" in second.stderr
    assert "continuing" not in first.stderr + other.stderr


def test_what_a_run_has_read_is_kept_for_the_next(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    workflow, folder = write_workflow(GOOD), tmp_path / "kv"
    lines, replies = [], []
    for _ in range(2):
        # As in another process: the model is loaded anew.
        commands.shared_runtimes.close()
        result = invoke("run", workflow, "hello", "--kv-dir", folder)
        assert result.exit_code == 0, result.output
        lines.append(result.stdout.splitlines()[-1])
        replies.append([line for line in result.stdout.splitlines() if " | " in line and "tokens/s" not in line])
    assert lines[0].startswith(f"state in {folder}: entries restored: 0 (0.0 MB read), kept for the next run: 2 (")
    assert lines[1].startswith(f"state in {folder}: entries restored: 2 (")
    assert lines[1].endswith("kept for the next run: 2 (0.0 MB newly written)")
    assert replies[0] == replies[1]
    assert len(list(folder.iterdir())) == 2
    as_json = invoke("run", workflow, "hello", "--kv-dir", folder, "--json")
    assert [json.loads(line)["event"] for line in as_json.stdout.splitlines()]


def test_damaged_state_is_warned_of_and_the_run_goes_on(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workflow, folder = write_workflow(GOOD), tmp_path / "kv"
    commands.shared_runtimes.close()
    invoke("run", workflow, "hello", "--kv-dir", folder)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    commands.shared_runtimes.close()
    result = invoke("run", workflow, "hello", "--kv-dir", folder)
    assert result.exit_code == 0, result.output
    assert "entries restored: 0 (0.0 MB read), kept for the next run: 2 (" in result.stdout
    assert caplog.text.count("is not used: ") == 2


def test_a_folder_for_state_that_is_none_stops_run_before_the_model_is_loaded(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow, plain = write_workflow(GOOD), tmp_path / "plain"
    plain.write_text("text")
    monkeypatch.setattr(commands, "_load", lambda _: pytest.fail("the model was loaded"))
    for folder in (plain, plain / "kv"):
        result = invoke("run", workflow, "hello", "--kv-dir", folder)
        assert result.exit_code == 2
        assert f"cannot keep state in {folder}: " in result.stderr
        assert "Traceback" not in result.stderr
    assert invoke("run", workflow, "hello", "--kv-dir", tmp_path, "--kv-max-mb", "0").exit_code == 2
    empty = invoke("run", workflow, "hello", "--kv-dir", "")
    assert (empty.exit_code, "--kv-dir is empty" in empty.stderr) == (2, True)
    alone = invoke("run", workflow, "hello", "--kv-max-mb", "10")
    assert (alone.exit_code, "give --kv-dir DIR too" in alone.stderr) == (2, True)


def test_an_interrupted_run_keeps_what_was_read(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(events: Iterable[object], **_: object) -> None:
        for event in events:
            if isinstance(event, AgentFinished):
                raise KeyboardInterrupt

    commands.shared_runtimes.close()
    workflow, folder = write_workflow(GOOD), tmp_path / "kv"
    monkeypatch.setattr(commands, "show_events", interrupted)
    assert invoke("run", workflow, "hello", "--kv-dir", folder).exit_code == 130
    assert list(folder.iterdir())


def test_a_run_that_cannot_save_its_state_says_so(
    write_workflow: Write, invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("offset_runtime.state_folder.write_atomically", full)
    commands.shared_runtimes.close()
    result = invoke("run", write_workflow(GOOD), "hello", "--kv-dir", tmp_path / "kv")
    assert result.exit_code == 2
    assert "editor | " in result.stdout
    assert "cannot save state in" in result.stderr
    assert "No space left on device" in result.stderr
