"""An agent's second turn, over a history whose state the prefix cache holds: beside reading it all again, and after
turns of other domains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from offset_runtime.backends.base import Backend
from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import MeasurementError, Ratio, measure
from offset_runtime.bench.workload import (
    CACHE,
    NO_CACHE,
    check_cache,
    check_room,
    endless_engine,
    prompt,
    random_offset,
    request,
    run_together,
)
from offset_runtime.placement import place
from offset_runtime.request import Request
from offset_runtime.runtime import OffsetRuntime


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """`cached_tokens`: of the second turn's prompt, what the first turn left. `new_tokens`: the rest of that prompt.

    `reply_tokens`: of each reply but the timed one. `other_domains`: how many others take a turn in between.
    """

    cached_tokens: int = 1024
    new_tokens: int = 64
    reply_tokens: int = 16
    other_domains: int = 3


class Dialogue:
    """A first turn in one domain, and the turns of any domain over the history that it leaves.

    The first turn's offset stays where it was, so that a later turn's prompt agrees with it to its end.
    """

    def __init__(self, backend: Backend, sizes: TurnSizes) -> None:
        self.sizes = sizes
        self._tokenizer = backend.tokenizer
        self._offsets = [random_offset(backend.identity, number) for number in range(1 + sizes.other_domains)]
        # Of the reply all but its last token is read.
        asked = prompt(self._tokenizer, sizes.cached_tokens - sizes.reply_tokens + 1)
        self.first = request(asked, self._offsets[0], sizes.reply_tokens)
        with endless_engine(backend) as engine:
            (completion,) = run_together(engine, [self.first]).completions
        # Greedy, so it is the reply of every later run too.
        self._history = (*self.first.prompt_ids, *completion.token_ids[:-1])

    def turn(self, domain: int = 0, reply_tokens: int = 1) -> Request:
        """The next turn of the domain of this number over the same history; 0 is the domain of the first turn."""
        tokens = (*self._history, *prompt(self._tokenizer, self.sizes.new_tokens, start=11 * domain + 5))
        asked = request(tokens, output_tokens=reply_tokens)
        return replace(asked, placements=(*self.first.placements, place(self._offsets[domain], len(tokens))))


def first_token_s(backend: Backend, dialogue: Dialogue, others: int = 0) -> float:
    """Seconds to the first token of the second turn, the first one's state cached, after turns of `others` domains.

    Raises `MeasurementError` unless all of the history came from the cache.
    """
    sizes = dialogue.sizes
    # A fresh engine each time: nothing but this dialogue is in its cache.
    with endless_engine(backend, CACHE) as engine:
        run_together(engine, [dialogue.first])
        for domain in range(1, others + 1):
            run_together(engine, [dialogue.turn(domain, sizes.reply_tokens)])
        group = run_together(engine, [dialogue.turn()])
    cached = group.completions[0].usage.cached_tokens
    # Where two turns begin alike by chance it is a little more.
    if cached < sizes.cached_tokens:
        raise MeasurementError(
            f"of the second turn's prompt {cached} tokens came from the prefix cache; expected {sizes.cached_tokens}"
        )
    return group.first_token_s


def measure_second_turn(sizes: TurnSizes, case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds to the first token of an agent's second turn, with the prefix cache and without."""
    backend = runtime.backend
    dialogue = _dialogue(backend, sizes, entries=1)

    def uncached() -> float:
        with endless_engine(backend, NO_CACHE) as engine:
            return run_together(engine, [dialogue.turn()]).first_token_s

    return measure(
        case.name,
        lambda: first_token_s(backend, dialogue),
        uncached,
        goal=case.goal,
        pairs=setting.pairs,
        progress=setting.progress,
    )


def measure_other_domains(sizes: TurnSizes, case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds to the first token of an agent's second turn, with turns of other domains before it and without."""
    backend = runtime.backend
    dialogue = _dialogue(backend, sizes, entries=1 + sizes.other_domains)
    return measure(
        case.name,
        lambda: first_token_s(backend, dialogue, sizes.other_domains),
        lambda: first_token_s(backend, dialogue),
        goal=case.goal,
        pairs=setting.pairs,
        progress=setting.progress,
    )


second_turn = partial(measure_second_turn, TurnSizes())
second_turn_other_domains = partial(measure_other_domains, TurnSizes())


def _dialogue(backend: Backend, sizes: TurnSizes, entries: int) -> Dialogue:
    check_cache(backend, entries)
    tokens = sizes.cached_tokens + sizes.new_tokens + sizes.reply_tokens
    check_room(backend, tokens, sequences=entries + 1)
    return Dialogue(backend, sizes)
