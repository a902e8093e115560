"""A running workflow on the terminal, as plain lines, or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from offset_runtime.graphs.events import (
    AgentFinished,
    AgentStarted,
    AgentToken,
    RouteChosen,
    WorkflowEvent,
    WorkflowFinished,
    event_record,
)
from offset_runtime.offset import DomainOffset
from offset_runtime.runtime import OffsetRuntime

_AGENT_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_PLAIN_WIDTH = 96
_LIVE_HZ = 12
_LEGEND = (
    "perplexity: change on held-out text of the domain under the agent's offset (its gain). "
    "KL: how far replies to generic instructions move from the base's, in nats (retention)."
)
# What a model writes must not steer the terminal; line feeds and tabs may stay.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")


def show_events(
    events: Iterable[WorkflowEvent],
    *,
    offsets: Mapping[str, DomainOffset | None] | None = None,
    console: Console | None = None,
    as_json: bool = False,
) -> list[AgentFinished]:
    """Show the events of a run as they come, and return its finished turns.

    On a terminal each running agent has a panel that grows, in the agent's colour; elsewhere text comes in
    lines that begin with the agent's name. A table of the turns ends both, with the held-out figures
    of `offsets`, by agent. `as_json`: one JSON object a line for each event, and nothing else.
    """
    console = console or Console()
    view: _View = _JsonView(console) if as_json else _LiveView(console) if console.is_terminal else _PlainView(console)
    turns: list[AgentFinished] = []
    with view:
        for event in events:
            view.show(event)
            if isinstance(event, AgentFinished):
                turns.append(event)
    if not as_json:
        console.print(turns_table(turns, offsets))
        if any(offset is not None for offset in (offsets or {}).values()):
            console.print(_LEGEND, style="dim")
    return turns


def turns_table(turns: Sequence[AgentFinished], offsets: Mapping[str, DomainOffset | None] | None = None) -> Table:
    """A row a turn: the agent, its domain, its tokens, seconds in prefill and decode, and what its offset does.

    That is, from the file of each of `offsets` (by agent): the change of perplexity on held-out text of the
    domain, and how far the base's replies to generic instructions move (KL, in nats).
    """
    # Nine columns fit into 80 characters only this tightly.
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("agent", "domain"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt\ntokens", "output\ntokens", "prefill\ns", "decode\ns", "tokens/s", "perplexity", "KL"):
        table.add_column(heading, justify="right", no_wrap=True)
    styles = _Styles()
    for turn in turns:
        gain, kl = _effect((offsets or {}).get(turn.agent))
        table.add_row(
            Text(turn.agent, style=styles.of(turn.agent)),
            Text(turn.domain or "-"),
            str(turn.usage.prompt_tokens),
            str(turn.usage.output_tokens),
            f"{turn.timings.prefill_s:.2f}",
            f"{turn.timings.decode_s:.2f}",
            _rate(turn),
            gain,
            kl,
        )
    return table


def _effect(offset: DomainOffset | None) -> tuple[str, str]:
    """Gain and retention together, or neither."""
    metrics = {} if offset is None else offset.metrics
    gain, retention = metrics.get("gain_percent"), metrics.get("retention")
    if gain is None or retention is None:
        return "-", "-"
    return f"{-gain:+.1f} %", f"{retention['kl']:.3f}"


def memory_line(runtime: OffsetRuntime, offsets: Mapping[str, DomainOffset | None]) -> str:
    """What is in memory: one base model, whatever the number of agents, the offsets, by agent, and the prefix cache."""
    cache = runtime.engine.cache_figures
    unique = {offset.digest: offset.tensor.nbytes for offset in offsets.values() if offset is not None}
    return (
        f"in memory: 1 base model of {runtime.backend.model_bytes() / 1e6:.0f} MB on {runtime.backend.name} "
        f"for {len(offsets)} agents, "
        f"{len(unique)} domain offsets of {sum(unique.values()) / 1e3:.0f} KB together, and a prefix cache of "
        f"{cache.bytes / 1e6:.1f} MB (entries: {cache.entries}, evicted: {cache.evictions})"
    )


class _View(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, event: WorkflowEvent) -> None: ...


class _Styles:
    """A colour for each agent, in the order they appear."""

    def __init__(self) -> None:
        self._agents: dict[str, str] = {}

    def of(self, agent: str) -> str:
        return self._agents.setdefault(agent, _AGENT_STYLES[len(self._agents) % len(_AGENT_STYLES)])


class _LiveView:
    """A growing panel for each running agent; finished replies scroll up above them in full."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles = _Styles()
        self._running: dict[str, tuple[str | None, str]] = {}
        self._spinner = Spinner("dots", text=Text("reading the prompt", style="dim"))
        self._live = Live(console=console, refresh_per_second=_LIVE_HZ, transient=True, get_renderable=self._panels)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What an interrupted agent had written stays on the screen.
        for agent, (domain, text) in self._running.items():
            if text:
                self._console.print(self._panel(agent, domain, _text(text), "interrupted"))
        self._running.clear()
        self._live.stop()

    def show(self, event: WorkflowEvent) -> None:
        match event:
            case AgentStarted(agent, domain):
                self._running[agent] = (domain, "")
            case AgentToken(agent, domain, text):
                _, so_far = self._running.get(agent, (domain, ""))
                self._running[agent] = (domain, so_far + text)
            case AgentFinished(agent, domain, reply):
                self._running.pop(agent, None)
                self._console.print(self._panel(agent, domain, _text(reply), _summary(event)))
            case RouteChosen():
                self._console.print(_chosen(event))
            case WorkflowFinished():
                self._console.print(_closing(event))

    def _panels(self) -> RenderableType:
        # Called from the thread that refreshes, while `show` may change the dict.
        running = list(self._running.items())
        rows = max((self._console.height - 2) // max(len(running), 1) - 3, 1)
        return Group(*(self._growing(agent, domain, text, rows) for agent, (domain, text) in running))

    def _growing(self, agent: str, domain: str | None, text: str, rows: int) -> Panel:
        if not text:
            return self._panel(agent, domain, self._spinner)
        lines = _text(text).wrap(self._console, self._console.width - 4)
        return self._panel(agent, domain, Text("\n").join(lines[-rows:]))

    def _panel(self, agent: str, domain: str | None, body: RenderableType, subtitle: str | None = None) -> Panel:
        style = self._styles.of(agent)
        title = Text.assemble((agent, f"bold {style}"), (f"  {domain or 'plain base'}", style))
        under = None if subtitle is None else Text(subtitle, style="dim")
        return Panel(body, title=title, title_align="left", subtitle=under, subtitle_align="right", border_style=style)


class _PlainView:
    """Lines that begin with the agent's name, so that replies written at the same time stay apart."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles = _Styles()
        self._pending: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in list(self._pending):
            self._flush(agent)

    def show(self, event: WorkflowEvent) -> None:
        match event:
            case AgentStarted(agent, domain):
                # What is left is of a reply that failed, and is written again.
                self._flush(agent)
                self._write(agent, f"[{domain or 'plain base'}]")
            case AgentToken(agent, _, text):
                self._add(agent, text)
            case AgentFinished(agent):
                self._flush(agent)
                self._write(agent, f"[{_summary(event)}]")
            case RouteChosen():
                self._console.print(_chosen(event), soft_wrap=True)
            case WorkflowFinished():
                self._console.print(_closing(event))

    def _add(self, agent: str, text: str) -> None:
        *lines, rest = (self._pending.get(agent, "") + text).split("\n")
        while len(rest) > _PLAIN_WIDTH and " " in rest.strip():
            cut = rest.rfind(" ", 1, _PLAIN_WIDTH)
            cut = cut if cut > 0 else rest.index(" ", 1)
            lines.append(rest[:cut])
            rest = rest[cut + 1 :]
        for line in lines:
            self._write(agent, line)
        self._pending[agent] = rest

    def _flush(self, agent: str) -> None:
        rest = self._pending.pop(agent, "")
        if rest:
            self._write(agent, rest)

    def _write(self, agent: str, line: str) -> None:
        prefix = Text(f"{agent} | ", style=self._styles.of(agent))
        self._console.print(prefix + _text(line), soft_wrap=True)


class _JsonView:
    """One JSON object a line."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, event: WorkflowEvent) -> None:
        self._file.write(json.dumps(event_record(event), ensure_ascii=False) + "\n")
        self._file.flush()


def _text(written: str) -> Text:
    """`written` as it is: no markup, no control characters."""
    return Text(written.translate(_CONTROLS))


def _rate(turn: AgentFinished) -> str:
    # The first token belongs to prefill.
    later = turn.usage.output_tokens - 1
    return f"{later / turn.timings.decode_s:.1f}" if later > 0 and turn.timings.decode_s > 0 else "-"


def _summary(turn: AgentFinished) -> str:
    rate = _rate(turn)
    speed = "" if rate == "-" else f", {rate} tokens/s"
    cut = "" if turn.finish_reason == "stop" else f", ended by {turn.finish_reason}"
    return f"{turn.usage.output_tokens} tokens{speed}{cut}"


def _chosen(event: RouteChosen) -> Text:
    scores = ", ".join(f"{domain} {score:+.2f}" for domain, score in event.scores.items())
    return Text(f"route from {event.source}: {event.domain or 'unsure'}{f' ({scores})' if scores else ''}", style="dim")


def _closing(event: WorkflowFinished) -> Text:
    turns = f"{event.turns} turn{'' if event.turns == 1 else 's'}"
    again = f"; {event.cached_tokens} of {event.prompt_tokens} prompt tokens came from the prefix cache"
    return Text(f"{turns} in {event.elapsed_s:.1f} s{again if event.cached_tokens else ''}\n", style="dim")
