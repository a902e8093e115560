"""What a run looks like: live panels, plain lines, JSON lines, and the table."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Mapping

import pytest
from rich.console import Console

from offset_runtime import DomainOffset, OffsetRuntime
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.graphs import (
    AgentFinished,
    AgentStarted,
    AgentToken,
    WorkflowEvent,
    WorkflowFinished,
    show_events,
    turns_table,
)
from offset_runtime.graphs.terminal import memory_line
from offset_runtime.request import Timings, Usage


def finished(agent: str, reply: str, **usage: int) -> AgentFinished:
    return AgentFinished(agent, "news", reply, "stop", Usage(12, usage.get("output", 3)), Timings(0.1, 0.5, 1.0))


def together() -> list[WorkflowEvent]:
    """Two agents that write at the same time."""
    return [
        AgentStarted("a", "news"),
        AgentStarted("b", "news"),
        AgentToken("a", "news", "one "),
        AgentToken("b", "news", "un "),
        AgentToken("a", "news", "two\nthree"),
        AgentToken("b", "news", "deux"),
        finished("b", "un deux"),
        finished("a", "one two\nthree"),
        WorkflowFinished(2, 1.5),
    ]


def shown(events: Iterable[WorkflowEvent], *, terminal: bool = False, as_json: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system="standard" if terminal else None)
    show_events(events, console=console, as_json=as_json)
    return file.getvalue()


def test_plain_lines_of_agents_that_write_at_once_stay_whole() -> None:
    lines = [line.rstrip() for line in shown(together()).split("\n")]
    assert lines[:8] == [
        "a | [news]",
        "b | [news]",
        "a | one two",
        "b | un deux",
        "b | [3 tokens, 2.0 tokens/s]",
        "a | three",
        "a | [3 tokens, 2.0 tokens/s]",
        "2 turns in 1.5 s",
    ]


def test_a_long_plain_line_is_shown_before_it_ends() -> None:
    seen: list[str] = []
    file = io.StringIO()

    def events() -> Iterable[WorkflowEvent]:
        for _ in range(40):
            yield AgentToken("a", None, "word ")
        seen.append(file.getvalue())

    show_events(events(), console=Console(file=file, width=200))
    assert seen[0].startswith("a | word word")
    assert all(len(line) <= 100 for line in seen[0].split("\n"))
    assert file.getvalue().partition("\n\n")[0].count("word") == 40


def test_plain_output_has_no_escape_codes() -> None:
    assert "\x1b" not in shown(together())


def test_the_terminal_shows_each_reply_in_full_in_its_agents_colour() -> None:
    text = shown(together(), terminal=True)
    assert "un deux" in text
    assert "three" in text
    assert "\x1b[36m" in text, "the first agent is cyan"
    assert "\x1b[35m" in text, "the second is magenta"


def test_the_terminal_keeps_what_an_interrupted_agent_wrote() -> None:
    def events() -> Iterable[WorkflowEvent]:
        yield AgentStarted("a", None)
        yield AgentToken("a", None, "half a senten")
        raise KeyboardInterrupt

    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        show_events(events(), console=Console(file=file, force_terminal=True, width=80))
    tail = file.getvalue()[file.getvalue().rindex("half a senten") :]
    assert "interrupted" in tail


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_model_writes_steers_neither_the_terminal_nor_the_markup(terminal: bool) -> None:
    nasty = "[bold]x[/bold] \x1b[2J\x07 [/nonsense]"
    text = shown([AgentToken("a", None, nasty), finished("a", nasty), WorkflowFinished(1, 1.0)], terminal=terminal)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text
    assert "[/nonsense]" in text


def test_json_is_one_object_a_line_and_nothing_else() -> None:
    lines = shown(together(), as_json=True).splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["event"] for record in records[-2:]] == ["agent_finished", "workflow_finished"]
    assert records[0] == {"event": "agent_started", "agent": "a", "domain": "news"}
    assert records[-2]["usage"] == {"prompt_tokens": 12, "output_tokens": 3, "cached_tokens": 0}
    assert records[-2]["timings"] == {"queue_s": 0.1, "prefill_s": 0.5, "decode_s": 1.0}
    assert len(records) == len(together())


def table_rows(*turns: AgentFinished, offsets: Mapping[str, DomainOffset | None]) -> list[list[str]]:
    file = io.StringIO()
    Console(file=file, width=80).print(turns_table(turns, offsets))
    return [line.split() for line in file.getvalue().splitlines()[-len(turns) :]]


def test_the_table_has_a_row_a_turn_with_gain_and_retention(make_offset: Callable[..., DomainOffset]) -> None:
    plain = make_offset(FakeBackend().identity)
    measured = dataclasses.replace(plain, metrics={"gain_percent": 21.04, "retention": {"kl": 0.0312}})

    rows = table_rows(
        finished("writer", "x"), finished("editor", "y", output=1), offsets={"writer": measured, "editor": None}
    )

    assert rows == [
        ["writer", "news", "12", "3", "0.50", "1.00", "2.0", "-21.0", "%", "0.031"],
        ["editor", "news", "12", "1", "0.50", "1.00", "-", "-", "-"],
    ]


def test_gain_is_never_shown_without_retention(make_offset: Callable[..., DomainOffset]) -> None:
    offset = dataclasses.replace(make_offset(FakeBackend().identity), metrics={"gain_percent": 21.04})

    (row,) = table_rows(finished("writer", "x"), offsets={"writer": offset})

    assert row[-2:] == ["-", "-"]


def test_the_memory_line_counts_one_base_model_and_each_offset_once(make_offset: Callable[..., DomainOffset]) -> None:
    with OffsetRuntime(FakeBackend()) as runtime:
        offset = make_offset(runtime.backend.identity, positions=4)  # 4 x 16 float32
        line = memory_line(runtime, {"a": offset, "b": offset, "c": None})

    assert "1 base model" in line
    assert "for 3 agents" in line
    assert "1 domain offsets of 0 KB" in line


def test_the_turns_are_returned() -> None:
    turns = show_events(together(), console=Console(file=io.StringIO()))
    assert [turn.agent for turn in turns] == ["b", "a"]
