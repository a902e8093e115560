"""What the engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from offset_runtime.constrain import Constraint
from offset_runtime.offset import DomainOffset
from offset_runtime.placement import Placement
from offset_runtime.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Whose state a request leaves behind, and who reads on: what the prefix cache had better keep.

    `session` names a conversation, `reader` the one of its readers whose request this is. `upcoming`: in how many
    steps (1: the next) each reader of the session is expected to read again; it replaces what an earlier request
    of the session said. Where an entry must go, those of readers that nobody expects go first.
    """

    session: str
    reader: str
    upcoming: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids plus placements, and how to reply.

    `timeout_s`: seconds from submission, waiting included, after which the request fails with
    `DeadlineExceededError`. `score_from`: position from which the prompt's own log-probabilities are
    returned (at least 1: nothing precedes position 0), or None. `reuse`: what the prefix cache is to know, or
    None. `background`: start only while no other request waits or runs. `constraint`: what the reply must look like, or
    None for any text; it ends as soon as nothing more can follow. One that `max_tokens` or a stop string cuts is the
    beginning of a valid one.
    """

    prompt_ids: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float | None = None
    score_from: int | None = None
    reuse: Reuse | None = None
    background: bool = False
    constraint: Constraint | None = None

    @property
    def offset(self) -> DomainOffset | None:
        """What the reply, or the text that is scored, stands under; other placements lie on earlier turns."""
        begins = (len(self.prompt_ids), self.score_from)
        own = (p.offset for p in self.placements if p.offset.anchor == "sequence" or p.stop in begins)
        return next(own, None)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the reply, its natural log-probability before temperature and constraint, and the likeliest there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a reply: new text (may be empty while a character or stop string is undecided)."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read, tokens generated (the end token included), and tokens not read again thanks to the cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, in prefill (until the first token) and in decode (from then to the end)."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The prefix cache at the end of a request: what it holds, and how many entries gave way while the request ran."""

    entries: int = 0
    bytes: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `prompt_logprobs` is filled only for requests with `score_from`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    cache: CacheUse = CacheUse()


Event = Delta | Completion | Exception
Sink = Callable[[Event], None]
