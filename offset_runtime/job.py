"""One request on its way through the engine: what it feeds next, and what its caller gets to see."""

from __future__ import annotations

import time
from functools import cached_property

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend, Chunk, SequenceId
from offset_runtime.constrain import Matcher
from offset_runtime.placement import Symbol, symbols
from offset_runtime.reply_text import ReplyText
from offset_runtime.request import Completion, Delta, FinishReason, Request, Sink, Timings, TokenLogprob, Usage
from offset_runtime.sampling import Sampler, log_softmax, top_logprobs

Logits = npt.NDArray[np.float32]


class Job:
    """A request on its way through the engine, and how far it has come."""

    def __init__(self, request: Request, sink: Sink, backend: Backend, matcher: Matcher | None = None) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = False
        self.submitted = time.monotonic()
        self.deadline = None if request.timeout_s is None else self.submitted + request.timeout_s
        self.started = self.submitted
        self.first_token: float | None = None
        self.sequence: SequenceId | None = None
        self.output_ids: list[int] = []
        self.cached_tokens = 0
        self.evictions_before = 0
        self._fed = 0
        self._borders: frozenset[int] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[float] = []
        self._sampler = Sampler(request.sampling, request.prompt_ids)
        self._reply = ReplyText(backend.tokenizer, request.sampling.stop)
        self._matcher = matcher
        self._eos = backend.tokenizer.eos_token_ids

    def open(self, sequence: SequenceId, cached_tokens: int, snapshot_tokens: int | None = None) -> None:
        """Start on a sequence that holds the first `cached_tokens` tokens of the prompt already.

        `snapshot_tokens`: the prompt is to be fed in chunks that end where a snapshot of its state may serve others,
        at the latest after as many tokens; None: in chunks of any size.
        """
        self.sequence = sequence
        if snapshot_tokens is not None:
            self._borders = self._snapshot_borders(snapshot_tokens)
        self.cached_tokens = self._fed = cached_tokens
        self.started = time.monotonic()

    @cached_property
    def prompt_symbols(self) -> list[Symbol]:
        """What the model is to read."""
        return symbols(self.request.prompt_ids, self.request.placements)

    @property
    def read_symbols(self) -> list[Symbol]:
        """What the model has read: all that the sequence holds."""
        return [*self.prompt_symbols, *self.output_ids][: self._fed]

    @property
    def reusable_tokens(self) -> int:
        """Most tokens of the prompt that need not be read again: the logits of the others are asked for."""
        first = self.request.score_from
        return len(self.request.prompt_ids) - 1 if first is None else first - 1

    @property
    def chunk_limit(self) -> int:
        """Most tokens of the next chunk: up to where the next snapshot is due, or all that are pending."""
        stop = self._fed + self.pending_tokens
        return min((border for border in self._borders or () if border > self._fed), default=stop) - self._fed

    @property
    def at_border(self) -> bool:
        """Whether a snapshot of what the sequence holds now may serve others."""
        return self._borders is not None and self._fed in self._borders

    def has_read(self, tokens: int) -> bool:
        """Whether the first `tokens` tokens have been fed."""
        return self._fed >= tokens

    def shareable(self, tokens: int) -> int:
        """Of the prompt's first `tokens` tokens, as many as another request can go on from, now or later.

        Where state cannot be cut back that is at the borders which are still to come.
        """
        if self._borders is None:
            return tokens
        return max((border for border in self._borders if self._fed <= border <= tokens), default=0)

    def _snapshot_borders(self, block_tokens: int) -> frozenset[int]:
        """Where blocks of the prompt end, where an offset begins, and where all is read that need not be again.

        What precedes an offset is what agents of other domains may have read too.
        """
        blocks = range(block_tokens, len(self.request.prompt_ids), block_tokens)
        turns = [placement.index for placement in self.request.placements]
        return frozenset({*blocks, *turns, self.reusable_tokens} - {0})

    @property
    def pending_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids) - self._fed

    @property
    def reserved_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def ready(self) -> bool:
        return self.sequence is not None

    @property
    def background(self) -> bool:
        return self.request.background

    def chunk(self, tokens: int) -> Chunk:
        """The next `tokens` tokens to feed."""
        assert self.sequence is not None
        prompt = self.request.prompt_ids
        if self._fed >= len(prompt):
            return Chunk(self.sequence, (self.output_ids[-1],))
        ids = prompt[self._fed : self._fed + tokens]
        scored = self.request.score_from is not None
        last = self._fed + tokens == len(prompt)
        return Chunk(self.sequence, ids, self.request.placements, "all" if scored else "last" if last else "none")

    def advance(self, tokens: int, logits: Logits) -> list[Delta | Completion]:
        """Take in the logits of the chunk just fed; return what the caller gets to see."""
        if self._fed < len(self.request.prompt_ids):
            self._score(tokens, logits)
        self._fed += tokens
        if self.pending_tokens > 0:
            return []
        if self.first_token is None:
            self.first_token = time.monotonic()
        if self.request.sampling.max_tokens == 0:
            return [self._complete("length")]
        return self._generate(logits[-1])

    def _generate(self, logits: Logits) -> list[Delta | Completion]:
        matcher = self._matcher
        token = self._sampler.sample(logits if matcher is None else matcher.mask(logits))
        self.output_ids.append(token)
        logprobs = self._token_logprobs(token, logits)
        if token in self._eos:
            return [*self._delta(self._reply.finish(), token, logprobs), self._complete("stop")]
        if matcher is not None:
            matcher.push(token)
        text = self._reply.push(token)
        if self._reply.stopped:
            return [*self._delta(text, token, logprobs), self._complete("stop")]
        ended = matcher is not None and matcher.ended
        if not ended and len(self.output_ids) < self.request.sampling.max_tokens:
            return self._delta(text, token, logprobs)
        text += self._reply.finish()
        reason: FinishReason = "stop" if ended or self._reply.stopped else "length"
        return [*self._delta(text, token, logprobs), self._complete(reason)]

    def _delta(self, text: str, token: int, logprobs: tuple[TokenLogprob, ...]) -> list[Delta | Completion]:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return [Delta(text, (token,), logprobs)]

    def _token_logprobs(self, token: int, logits: Logits) -> tuple[TokenLogprob, ...]:
        count = self.request.sampling.logprobs
        if count is None:
            return ()
        all_logprobs = log_softmax(logits)
        return (TokenLogprob(token, float(all_logprobs[token]), tuple(top_logprobs(all_logprobs, count))),)

    def _score(self, tokens: int, logits: Logits) -> None:
        if self.request.score_from is None:
            return
        prompt = self.request.prompt_ids
        # Row i of this chunk predicts position fed + i + 1.
        rows = range(max(0, self.request.score_from - self._fed - 1), min(tokens, len(prompt) - self._fed - 1))
        if rows:
            targets = [prompt[self._fed + row + 1] for row in rows]
            found = log_softmax(logits[rows.start : rows.stop])[np.arange(len(rows)), targets]
            self._prompt_logprobs.extend(float(value) for value in found)

    def _complete(self, reason: FinishReason) -> Completion:
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(self.output_ids),
            finish_reason=reason,
            usage=Usage(len(self.request.prompt_ids), len(self.output_ids), self.cached_tokens),
            timings=Timings(self.started - self.submitted, first - self.started, now - first),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
