"""What an offset does on held-out documents: gain, wrong-domain control, gain by position, retention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend
from offset_runtime.documents import Documents
from offset_runtime.errors import DocumentError, InvalidRequestError, UnknownDomainError
from offset_runtime.layout import MIN_REPLY_TOKENS, Example, lay_out, within_context
from offset_runtime.offset import DomainOffset, PromptFormat
from offset_runtime.retention import Retention, base_replies, instructions, measure_retentions
from offset_runtime.scoring import Array, distributions_under, pick_targets

RESAMPLES = 2000
COVERAGE = 0.95

Interval = tuple[float, float]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gain:
    """Perplexity of held-out documents without and with an offset, over all their tokens.

    `interval`: 95 % bootstrap interval of `percent` over documents, both figures of a document drawn
    together; None for a single document.
    """

    perplexity_without: float
    perplexity_with: float
    interval: Interval | None

    @property
    def percent(self) -> float:
        """By how much perplexity falls, in percent; negative where it rises."""
        return 100 * (1 - self.perplexity_with / self.perplexity_without)


@dataclass(frozen=True, slots=True)
class PositionCurve:
    """Mean cross-entropy in nats at each position of the reply, without and with the offset.

    `positions` counts from 0 (from 1 where nothing precedes the first token); `documents` says how
    many replies reach each position.
    """

    positions: tuple[int, ...]
    without: tuple[float, ...]
    with_offset: tuple[float, ...]
    documents: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "positions": list(self.positions),
            "without": list(self.without),
            "with": list(self.with_offset),
            "documents": list(self.documents),
        }


@dataclass(frozen=True, slots=True)
class DomainEvaluation:
    """A domain's own offset on its own documents.

    `documents` and `tokens` that were measured; `left_out` counts documents by reason.
    """

    gain: Gain
    retention: Retention
    by_position: PositionCurve
    documents: int
    tokens: int
    left_out: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "perplexity_without": self.gain.perplexity_without,
            "perplexity_with": self.gain.perplexity_with,
            "gain_percent": self.gain.percent,
            "gain_interval": self.gain.interval and list(self.gain.interval),
            "retention": self.retention.as_json(),
            "documents": self.documents,
            "tokens": self.tokens,
            "left_out": dict(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures of one evaluation.

    `matrix[documents' domain][offset's domain]` is the wrong-domain control; None where an offset's
    prompt format cannot hold the documents (conversations outside `chat`).
    """

    domains: Mapping[str, DomainEvaluation]
    matrix: Mapping[str, Mapping[str, Gain | None]]

    def as_json(self) -> dict[str, Any]:
        """Return the evaluation as `offset-runtime eval --json` prints it."""
        return {
            "domains": {name: domain.as_json() for name, domain in self.domains.items()},
            "matrix": _by_cell(self.matrix, lambda gain: gain.percent),
            "matrix_intervals": _by_cell(self.matrix, lambda gain: gain.interval and list(gain.interval)),
            "by_position": {name: domain.by_position.as_json() for name, domain in self.domains.items()},
        }


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """`done` of `total` readings of a document or reply under an offset or the base; `stage` says of what."""

    stage: str
    done: int
    total: int


ProgressCallback = Callable[[EvaluationProgress], None]


def evaluate(
    backend: Backend,
    offsets: Mapping[str, DomainOffset],
    documents: Mapping[str, Documents],
    *,
    max_tokens: int = 64,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Measure `offsets` on held-out `documents`, both by domain.

    Each offset is measured in its own prompt format and anchor, against the base in that format;
    documents are cut at `max_tokens` tokens. An offset without documents is a column of the matrix.

    Raises `UnknownDomainError` for documents of a domain without offset, `DocumentError` where no
    document is given or none can be used, `BaseModelMismatchError` for an offset of another model,
    and what `lay_out` raises.
    """
    _check(backend, offsets, documents, max_tokens)
    plans = {name: _plan(backend, name, offsets, found, max_tokens) for name, found in documents.items()}
    replies = len(instructions("test"))
    total = sum(plan.readings for plan in plans.values()) + replies * (2 + len(plans))
    tracker = _Tracker(total, progress)
    measured = {name: _measure(backend, plan, offsets, tracker) for name, plan in plans.items()}
    kept = _retentions(backend, {name: offsets[name] for name in documents}, tracker)
    return Evaluation(
        domains={name: plans[name].domain(measured[name], kept[name]) for name in plans},
        matrix={name: {column: measured[name].gains.get(column) for column in offsets} for name in plans},
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """One domain's documents laid out in one prompt format, and the offsets that are measured on them."""

    examples: list[Example]
    columns: list[str]


@dataclass(frozen=True, slots=True)
class _Measured:
    gains: Mapping[str, Gain]
    curve: PositionCurve


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is measured on one domain's documents; the first group is in the own offset's prompt format."""

    name: str
    groups: list[_Group]
    left_out: Mapping[str, int]

    @property
    def readings(self) -> int:
        return sum(len(group.examples) * (1 + len(group.columns)) for group in self.groups)

    def domain(self, measured: _Measured, retention: Retention) -> DomainEvaluation:
        examples = self.groups[0].examples
        return DomainEvaluation(
            gain=measured.gains[self.name],
            retention=retention,
            by_position=measured.curve,
            documents=len({example.document for example in examples}),
            tokens=sum(len(example.targets) for example in examples),
            left_out=self.left_out,
        )


class _Tracker:
    def __init__(self, total: int, callback: ProgressCallback | None) -> None:
        self._total, self._callback, self._done = total, callback, 0

    def advance(self, stage: str, count: int) -> None:
        self._done += count
        if self._callback:
            self._callback(EvaluationProgress(stage, self._done, self._total))


def _check(
    backend: Backend, offsets: Mapping[str, DomainOffset], documents: Mapping[str, Documents], max_tokens: int
) -> None:
    if max_tokens < MIN_REPLY_TOKENS:
        raise InvalidRequestError(f"max_tokens must be at least {MIN_REPLY_TOKENS}, found {max_tokens}")
    if not documents:
        raise DocumentError("no documents to evaluate on; give held-out documents for at least one domain")
    if not offsets:
        raise InvalidRequestError("no offsets to evaluate; train one with 'offset-runtime train'")
    for name, found in documents.items():
        if name not in offsets:
            raise UnknownDomainError(name, offsets)
        if not found.items:
            raise DocumentError(f"domain {name!r}: no documents to evaluate on, expected at least one")
        if found.digest() == offsets[name].documents_digest:
            _log.warning("domain %r: these are the documents it was trained on; the gain on others is lower", name)
    for name, offset in offsets.items():
        backend.identity.check(offset.base, domain=name)


def _plan(
    backend: Backend, name: str, offsets: Mapping[str, DomainOffset], documents: Documents, max_tokens: int
) -> _Plan:
    by_format: dict[PromptFormat, list[str]] = {offsets[name].prompt_format: []}
    conversations = any(document.messages for document in documents.items)
    for column, offset in offsets.items():
        if offset.prompt_format == "chat" or not conversations or column == name:
            by_format.setdefault(offset.prompt_format, []).append(column)
    groups: list[_Group] = []
    left_out: dict[str, int] = {}
    for prompt_format, columns in by_format.items():
        laid_out, short = lay_out(documents.items, backend.tokenizer, prompt_format, max_tokens=max_tokens)
        examples, long = within_context(laid_out, backend.capabilities.context_tokens)
        if not examples:
            raise DocumentError(
                f"domain {name!r}: none of {len(documents.items)} documents can be used in format {prompt_format!r}: "
                f"{short} are shorter than {MIN_REPLY_TOKENS} tokens, {long} exceed the context of "
                f"{backend.capabilities.context_tokens} tokens; give texts of a few sentences"
            )
        if not groups:
            left_out = {why: count for why, count in (("too short", short), ("too long", long)) if count}
        groups.append(_Group(examples, columns))
    if left_out:
        listing = ", ".join(f"{count} {why}" for why, count in left_out.items())
        _log.warning("domain %r: left out %s of %d documents", name, listing, len(documents.items))
    # What reading the files left out was said when they were read.
    return _Plan(name, groups, {**documents.skipped, **left_out})


def _measure(backend: Backend, plan: _Plan, offsets: Mapping[str, DomainOffset], tracker: _Tracker) -> _Measured:
    gains: dict[str, Gain] = {}
    curve: PositionCurve | None = None
    for group in plan.groups:
        columns = [None, *(offsets[name] for name in group.columns)]
        logprobs: list[list[Array]] = [[] for _ in columns]
        for batch, column, distributions in distributions_under(backend, group.examples, columns):
            logprobs[column].extend(pick_targets(e, d) for e, d in zip(batch, distributions, strict=True))
            tracker.advance(plan.name, len(batch))
        for name, ours in zip(group.columns, logprobs[1:], strict=True):
            gains[name] = _gain(group.examples, logprobs[0], ours)
            if name == plan.name:
                curve = _curve(group.examples, logprobs[0], ours)
    assert curve is not None
    return _Measured(gains, curve)


def _retentions(backend: Backend, offsets: Mapping[str, DomainOffset], tracker: _Tracker) -> dict[str, Retention]:
    stage = "retention"
    replies = base_replies(backend, "test")
    tracker.advance(stage, len(replies))
    found = measure_retentions(
        backend, replies, list(offsets.values()), progress=lambda count: tracker.advance(stage, count)
    )
    return dict(zip(offsets, found, strict=True))


def _gain(examples: Sequence[Example], without: Sequence[Array], ours: Sequence[Array]) -> Gain:
    """Perplexities over all tokens, and the interval of their ratio over documents."""
    index = {document: i for i, document in enumerate(dict.fromkeys(e.document for e in examples))}
    # By document: tokens, and the summed negative log-probability without and with the offset.
    sums = np.zeros((len(index), 3))
    for example, base, found in zip(examples, without, ours, strict=True):
        row = (len(base), -base.sum(dtype=np.float64), -found.sum(dtype=np.float64))
        sums[index[example.document]] += row
    tokens, nll_without, nll_with = sums.sum(axis=0)
    return Gain(float(np.exp(nll_without / tokens)), float(np.exp(nll_with / tokens)), gain_interval(sums))


def gain_interval(sums: npt.NDArray[np.float64]) -> Interval | None:
    """95 % percentile bootstrap interval of the gain in percent, over documents; None for fewer than two.

    `sums` (documents, 3): tokens, summed negative log-probability without, and with the offset. The
    same draws every time, so that equal figures give equal intervals.
    """
    count = len(sums)
    if count < 2:
        return None
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    tokens, without, with_offset = (draws @ sums).T
    gains = 100 * (1 - np.exp((with_offset - without) / tokens))
    low, high = np.quantile(gains, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def _curve(examples: Sequence[Example], without: Sequence[Array], ours: Sequence[Array]) -> PositionCurve:
    # Without a prompt, the first token of a document is not predicted.
    first = len(examples[0].reply_ids) - len(examples[0].targets)
    counts, mean_without = _position_means(without)
    _, mean_with = _position_means(ours)
    positions = tuple(range(first, first + len(counts)))
    return PositionCurve(positions, mean_without, mean_with, counts)


def _position_means(logprobs: Iterable[Array]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    arrays = list(logprobs)
    counts = np.zeros(max(len(array) for array in arrays), dtype=np.int64)
    sums = np.zeros(len(counts))
    for array in arrays:
        counts[: len(array)] += 1
        sums[: len(array)] -= array
    return tuple(int(n) for n in counts), tuple(float(v) for v in sums / counts)


def _by_cell(
    matrix: Mapping[str, Mapping[str, Gain | None]], value: Callable[[Gain], Any]
) -> dict[str, dict[str, Any]]:
    return {
        row: {column: None if gain is None else value(gain) for column, gain in cells.items()}
        for row, cells in matrix.items()
    }
