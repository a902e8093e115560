"""Random trees of agents: who goes on from which transcript, in what domain, and who is stopped on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from offset_runtime import DomainOffset, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.engine import Engine
from offset_runtime.errors import RequestCancelledError
from offset_runtime.placement import Placement, place
from offset_runtime.request import Completion
from offset_runtime.stream import Stream


@dataclass(frozen=True)
class Step:
    """One agent's call.

    `parent`, `keeps`: the transcript that it goes on from, and how many tokens of that. `drops`: whether it reads
    earlier turns without their authors' offsets. `turn`: the words it adds. `stop`: None, or the passes of the model
    after which it is cancelled. `waits`: whether its reply is read before the next step.
    """

    parent: int
    keeps: int
    drops: bool
    turn: tuple[int, ...]
    domain: int
    max_tokens: int
    scored: bool
    stop: int | None
    waits: bool


def steps(
    *, least_kept: int = 0, most_kept: int, words: int, most_words: int, replies: st.SearchStrategy[int]
) -> st.SearchStrategy[Step]:
    """Any step that adds up to `most_words` of `words` different words; `replies`: the most tokens of a reply."""
    return st.builds(
        Step,
        # Often the newest or the oldest transcript, so that the tree grows long as well as broad.
        parent=st.integers(-3, 30),
        keeps=st.just(most_kept) | st.integers(least_kept, most_kept) | st.just(most_kept),
        drops=st.sampled_from([False, False, False, True]),
        turn=st.lists(st.integers(0, words - 1), min_size=1, max_size=most_words).map(tuple),
        domain=st.integers(0, 5),
        max_tokens=replies,
        scored=st.sampled_from([False, False, False, True]),
        stop=st.sampled_from([None] * 9 + [0, 1, 2, 4, 8]),
        waits=st.booleans(),
    )


@dataclass(frozen=True)
class Transcript:
    """Tokens, and the offsets that earlier turns were read with."""

    ids: tuple[int, ...]
    placements: tuple[Placement, ...] = ()

    def first(self, tokens: int) -> Transcript:
        """The first `tokens` tokens; an offset that is cut keeps the rows before the cut."""
        kept = [replace(p, rows=min(p.rows, tokens - p.index)) for p in self.placements if p.index < tokens]
        return Transcript(self.ids[:tokens], tuple(kept))

    def with_turn(self, ids: Sequence[int], offset: DomainOffset | None) -> Transcript:
        """This and a turn, with the turn's own offset, which takes the place of those it falls on."""
        longer = (*self.ids, *ids)
        if offset is None:
            return Transcript(longer, self.placements)
        own = place(offset, len(longer))
        apart = [p for p in self.placements if p.stop <= own.index or own.stop <= p.index]
        return Transcript(longer, (*apart, own))


class Watched:
    """A backend that acts after some of its passes, on the engine's thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def after(self, passes: int, act: Callable[[], None]) -> None:
        """Call `act` after `passes` more passes. Held by `lock`, none begins meanwhile."""
        if passes == 0:
            act()
        else:
            self._due.append((passes, act))

    def forward(self, chunks: Sequence[Chunk]) -> Any:
        with self.lock:
            found = self._backend.forward(chunks)
            for passes, act in self._due:
                if passes == 1:
                    act()
            self._due = [(passes - 1, act) for passes, act in self._due if passes > 1]
            return found


@dataclass
class Played:
    """A request of a tree, and how it ended: `completion` None where it was cancelled before the end."""

    request: Request
    stream: Stream
    may_stop: bool
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None

    def read(self) -> None:
        """Read it to its end; once more does nothing."""
        if self.ended:
            return
        self.ended = True
        try:
            for delta in self.stream:
                self.token_ids.extend(delta.token_ids)
            self.completion = self.stream.completion
        except RequestCancelledError:
            assert self.may_stop

    def count(self, tally: Counter[str]) -> None:
        """Count what happened to it."""
        tally["requests"] += 1
        tally["with an earlier offset"] += len(self.request.placements) > 1
        if self.completion is None:
            tally["stopped before a token" if not self.token_ids else "stopped in its reply"] += 1
        else:
            tally["hits"] += self.completion.usage.cached_tokens > 0
            tally["completed"] += 1


@dataclass(frozen=True)
class Tree:
    """How steps become requests: the token ids of words, the domain's offset by number and prompt length, limits."""

    root: tuple[int, ...]
    words: Sequence[Sequence[int]]
    offset: Callable[[int, int, bool], DomainOffset | None]
    most_tokens: int

    def play(self, engine: Engine, watched: Watched, steps: Sequence[Step], renewed: int) -> list[Played]:
        """Submit a request a step, several of them at once, and read all to their ends.

        From step `renewed` on each domain is registered anew: the same name, other rows.
        """
        transcripts, played = [Transcript(self.root)], []
        for number, step in enumerate(steps):
            asked = self._asked(transcripts[step.parent % len(transcripts)], step, number >= renewed)
            request = self._request(asked, step)
            with watched.lock:
                one = Played(request, Stream(engine, request), step.stop is not None)
                if step.stop is not None:
                    watched.after(step.stop, one.stream.cancel)
            played.append(one)
            if step.waits:
                one.read()
            transcripts.append(Transcript((*asked.ids, *one.token_ids), asked.placements))
            if number % 6 == 5:
                for one in played:
                    one.read()
        for one in played:
            one.read()
        return played

    def _asked(self, parent: Transcript, step: Step, anew: bool) -> Transcript:
        turn = [token for word in step.turn for token in self.words[word]]
        history = parent.first(min(step.keeps, self.most_tokens - len(turn)))
        length = len(history.ids) + len(turn)
        read = Transcript(history.ids) if step.drops else history
        return read.with_turn(turn, self.offset(step.domain, length, anew))

    def _request(self, asked: Transcript, step: Step) -> Request:
        length = len(asked.ids)
        scored = step.scored and length > 1
        sampling = SamplingParams(max_tokens=0 if scored else step.max_tokens)
        return Request(asked.ids, asked.placements, sampling, None, max(1, length // 2) if scored else None)
