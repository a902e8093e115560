"""What happens while a workflow runs, as values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from offset_runtime.request import Timings, Usage


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """An agent's turn begins: its prompt is on its way to the engine."""

    agent: str
    domain: str | None


@dataclass(frozen=True, slots=True)
class AgentToken:
    """New text of an agent's reply."""

    agent: str
    domain: str | None
    text: str


@dataclass(frozen=True, slots=True)
class AgentFinished:
    """An agent's whole reply, why it ended ("stop" or "length"), its tokens and its seconds per phase."""

    agent: str
    domain: str | None
    reply: str
    finish_reason: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class WorkflowFinished:
    """The workflow reached END after `turns` turns of agents and `elapsed_s` seconds.

    Of `prompt_tokens` of all turns `cached_tokens` were not read again, thanks to the prefix cache.
    """

    turns: int
    elapsed_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteChosen:
    """Where the last message goes behind `source`, an agent or START: to `domain`; None is unsure.

    `scores`: by how many nats a token each domain finds it more likely than the plain base does.
    """

    source: str
    domain: str | None
    scores: dict[str, float]


WorkflowEvent = AgentStarted | AgentToken | AgentFinished | RouteChosen | WorkflowFinished


def event_record(event: WorkflowEvent) -> dict[str, Any]:
    """Return `event` as a JSON object: its fields, and its kind under ``event``, such as ``agent_token``."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    return {"event": kind, **asdict(event)}
