"""Agents of several domains that take a turn each over one history, with offsets of either anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from offset_runtime.backends.base import Backend
from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import Ratio, measure
from offset_runtime.bench.workload import (
    CACHE,
    check_cache,
    check_room,
    endless_engine,
    prompt,
    random_offset,
    request,
    run_together,
)
from offset_runtime.offset import Anchor
from offset_runtime.request import Request
from offset_runtime.runtime import OffsetRuntime


@dataclass(frozen=True, slots=True)
class HistorySizes:
    """`history_tokens`: what all agents read first. `turn_tokens`: each agent's own, behind it."""

    history_tokens: int = 1024
    turn_tokens: int = 64
    agents: int = 4

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one agent's prompt."""
        return self.history_tokens + self.turn_tokens

    @property
    def most_prefilled_tokens(self) -> int:
        """What the agents may read together where they share the history."""
        return self.history_tokens + self.agents * self.turn_tokens


def measure_shared_history(sizes: HistorySizes, case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds until each of the agents, one after the other, has its first token; the cache is on with both anchors.

    The ratio's `breach` tells if they read more together than the history once and their own turns.
    """
    backend = runtime.backend
    check_cache(backend, sizes.agents)
    check_room(backend, sizes.prompt_tokens + 1, sequences=sizes.agents + 1)
    prefilled: dict[Anchor, int] = {"turn": 0, "sequence": 0}

    def seconds(anchor: Anchor) -> float:
        taken, read = take_turns(backend, turns(backend, sizes, anchor))
        # The most of all rounds: a bound must hold in each.
        prefilled[anchor] = max(prefilled[anchor], read)
        return taken

    ratio = measure(
        case.name,
        lambda: seconds("turn"),
        lambda: seconds("sequence"),
        goal=case.goal,
        pairs=setting.pairs,
        progress=setting.progress,
    )
    most = sizes.most_prefilled_tokens
    details = {
        "a_prefilled_tokens": prefilled["turn"],
        "b_prefilled_tokens": prefilled["sequence"],
        "most_prefilled_tokens": most,
    }
    breach = f"{prefilled['turn']} tokens were prefilled with turn anchors; expected at most {most}"
    return replace(
        ratio,
        details=details,
        breach=breach if prefilled["turn"] > most else "",
        note=f"prefilled tokens {prefilled['turn']} / {prefilled['sequence']}, of at most {most} with turn anchors",
    )


def turns(backend: Backend, sizes: HistorySizes, anchor: Anchor) -> list[Request]:
    """A turn of each agent, in a domain of its own: the history, then the agent's own instructions."""
    history = prompt(backend.tokenizer, sizes.history_tokens)
    return [
        request(
            (*history, *prompt(backend.tokenizer, sizes.turn_tokens, start=11 * agent + 5)),
            random_offset(backend.identity, agent, anchor),
            output_tokens=1,
        )
        for agent in range(sizes.agents)
    ]


def take_turns(backend: Backend, requests: Sequence[Request]) -> tuple[float, int]:
    """Run requests one after the other, the cache empty at first; return seconds to first tokens, and tokens read."""
    with endless_engine(backend, CACHE) as engine:
        groups = [run_together(engine, [asked]) for asked in requests]
    usages = [group.completions[0].usage for group in groups]
    read = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    return sum(group.first_token_s for group in groups), read


shared_history = partial(measure_shared_history, HistorySizes())
