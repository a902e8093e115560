"""Learning a domain offset: all weights frozen, K x d numbers trained on about 100 documents.

The loss is the mean next-token loss on the documents, plus the sum of squares of δ, plus, to keep the
base's behaviour on everything else, KL(base || with offset) on the base's own replies to generic
instructions. The first two are those of the paper that the method comes from
(https://arxiv.org/abs/2607.18302); docs/evaluation.md has the figures behind the third.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from offset_runtime.backends.torch import TorchBackend
from offset_runtime.documents import Document, Documents
from offset_runtime.errors import DocumentError
from offset_runtime.layout import Example, default_anchor, lay_out, within_context
from offset_runtime.objective import Objective, Prepared
from offset_runtime.offset import Anchor, DomainOffset, PromptFormat
from offset_runtime.placement import anchor_index
from offset_runtime.retention import (
    KL_BUDGET,
    SPLITS,
    base_replies,
    instruction_prompt,
    instructions,
    measure_retention,
)
from offset_runtime.scoring import perplexity, target_logprobs

_log = logging.getLogger(__name__)

# Below this many documents none are held back, so nothing is known about unseen text.
MIN_DOCUMENTS_TO_VALIDATE = 10
MAX_VALIDATION_DOCUMENTS = 16

# Many short replies hold the base better than few long ones: an offset moves the first tokens of a
# reply most, and with few instructions it learns to spare those alone.
TRAINING_REPLY_TOKENS = 20


class TrainingSettings(BaseModel):
    """How an offset is trained. The defaults suit agents: chat format, turn anchor, retention held.

    `positions`: K. `max_tokens`: tokens a document is cut at. `learning_rate`: Adam's; with a retention
    term it falls to a tenth along a cosine. `batch_size`: documents a step. `steps`: the most steps.
    `l2`: weight of the sum of squares of δ. `retention_weight`: weight of KL(base || with offset); 0
    leaves the term out, as the paper does. `max_kl`: steps whose KL on the validation instructions lies
    above it, in nats, are kept only if no other is (not with a `retention_weight` of 0).
    `validate_every`: steps between two looks at the validation split. `patience`: looks without a better
    one before training stops.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_format: PromptFormat = "chat"
    anchor: Anchor | None = None
    positions: int = Field(default=8, ge=1, le=256)
    max_tokens: int = Field(default=64, ge=8)
    learning_rate: float = Field(default=1e-2, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    steps: int = Field(default=36, ge=1)
    l2: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    retention_weight: float = Field(default=1.5, ge=0, allow_inf_nan=False)
    max_kl: float = Field(default=KL_BUDGET, gt=0)
    validate_every: int = Field(default=6, ge=1)
    patience: int = Field(default=3, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _turns_only_in_chat(self) -> Self:
        if self.anchor == "turn" and self.prompt_format != "chat":
            raise ValueError(f"format {self.prompt_format!r} has no turns; use anchor 'sequence', or format 'chat'")
        return self

    @classmethod
    def paper(cls, documents: int, **changes: Any) -> Self:
        """The paper's recipe (https://arxiv.org/abs/2607.18302): rate 1e-3, 3 epochs, no retention term.

        `documents`: how many are trained on, those held back not counted.
        """
        batch_size = max(1, int(changes.get("batch_size", 1)))
        recipe: dict[str, Any] = {
            "prompt_format": "raw",
            "positions": 1,
            "learning_rate": 1e-3,
            "batch_size": batch_size,
            "steps": math.ceil(3 * documents / batch_size),
            "retention_weight": 0.0,
            "max_tokens": 512,
            "validate_every": max(1, documents // batch_size // 2),
        }
        return cls(**{**recipe, **changes})

    @property
    def effective_anchor(self) -> Anchor:
        """The anchor given, or the default of the prompt format."""
        return self.anchor or default_anchor(self.prompt_format)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where training stands. `gain_percent` and `kl` are those of the last look at the validation split."""

    step: int
    steps: int
    loss: float
    gain_percent: float | None
    kl: float | None
    elapsed_s: float
    remaining_s: float


ProgressCallback = Callable[[TrainingProgress], None]


def train(
    backend: TorchBackend,
    documents: Documents,
    domain: str,
    settings: TrainingSettings | None = None,
    *,
    validation: Documents | None = None,
    progress: ProgressCallback | None = None,
) -> DomainOffset:
    """Train the offset of `domain` on `documents`; its `metrics` hold gain and retention.

    Without `validation`, up to a sixth of the documents is held back for it. The best step on the
    validation split is kept. Ctrl-C ends training with the best so far (before the first step it is
    passed on).

    Raises `DocumentError` when no document is long enough, `PromptFormatError` when the model cannot
    use the prompt format, `PlacementError` when a prompt has fewer tokens than the offset positions.
    """
    settings = settings or TrainingSettings()
    trainer = _Trainer(backend, documents, domain, settings, validation)
    try:
        trainer.run(progress)
    except KeyboardInterrupt:
        trainer.keep_best_so_far()
    finally:
        trainer.objective.close()
    return trainer.offset()


@dataclass(frozen=True, slots=True)
class _Look:
    """δ at a step, and how it does on the validation split."""

    step: int
    delta: Tensor
    loss: float
    kl: float

    def better_than(self, other: _Look | None, settings: TrainingSettings) -> bool:
        if other is None:
            return True
        if settings.retention_weight and (self.kl <= settings.max_kl) != (other.kl <= settings.max_kl):
            return self.kl <= settings.max_kl
        return self._objective(settings) < other._objective(settings)

    def _objective(self, settings: TrainingSettings) -> float:
        return self.loss + settings.retention_weight * self.kl


class _Trainer:
    def __init__(
        self,
        backend: TorchBackend,
        documents: Documents,
        domain: str,
        settings: TrainingSettings,
        validation: Documents | None,
    ) -> None:
        self._backend, self._domain, self._settings = backend, domain, settings
        self._documents = documents
        chosen, held_back = _split(documents.items, validation, settings.seed)
        self._train_examples = _examples(backend, chosen, domain, settings)
        self._held_back = _examples(backend, held_back, domain, settings) if held_back else []
        self.objective = Objective(backend, domain, settings.effective_anchor, settings.positions)
        self._check_instructions()
        self.best: _Look | None = None
        self.step = 0
        self._base_loss = 0.0
        self._delta = torch.zeros(settings.positions, backend.identity.hidden_size)

    def _check_instructions(self) -> None:
        """Refuse before the work, not after it, an offset that retention could not be measured with."""
        for split in SPLITS:
            for system, text in instructions(split):
                tokens = len(instruction_prompt(self._backend, text, system))
                anchor_index(self._settings.effective_anchor, self._settings.positions, tokens, domain=self._domain)

    def keep_best_so_far(self) -> None:
        """After an interrupt: keep the best look, or δ as it is where there was none yet."""
        if self.best is None:
            if self.step < 2:
                _log.warning("interrupted before the first step was done: nothing was learned, so nothing is kept")
                raise KeyboardInterrupt
            self.best = _Look(self.step, self._delta.detach().clone(), math.nan, math.nan)
        _log.warning("interrupted at step %d; the offset of step %d is kept", self.step, self.best.step)

    def run(self, progress: ProgressCallback | None) -> None:
        settings, started = self._settings, time.monotonic()
        batches, retention_batches, looks = self._prepare()
        delta = self._delta.requires_grad_()
        adam = torch.optim.Adam([delta], lr=settings.learning_rate, betas=(0.9, 0.99))
        self._base_loss = looks.base_loss
        last, misses, first_step = None, 0, time.monotonic()
        for self.step in range(1, settings.steps + 1):
            _set_rate(adam, settings, self.step)
            loss = self.objective.document_step(next(batches), delta)
            loss += self.objective.penalty_step(delta, settings.l2)
            if settings.retention_weight:
                loss += self.objective.retention_step(next(retention_batches), delta, settings.retention_weight)
            adam.step()
            adam.zero_grad()
            if self.step % settings.validate_every == 0 or self.step == settings.steps:
                last = looks.look(self.step, delta)
                misses = 0 if last.better_than(self.best, settings) else misses + 1
                self.best = self.best if misses else last
            if progress:
                progress(self._progress(loss, last, started, first_step))
            if misses >= settings.patience:
                _log.info("no better offset for %d looks; stopped at step %d", misses, self.step)
                break

    def offset(self) -> DomainOffset:
        assert self.best is not None
        settings = self._settings
        offset = DomainOffset(
            domain=self._domain,
            tensor=self.best.delta.numpy(),
            anchor=settings.effective_anchor,
            prompt_format=settings.prompt_format,
            base=self._backend.identity,
            training={
                **settings.model_dump(),
                "anchor": settings.effective_anchor,
                "documents": len({example.document for example in self._train_examples}),
                "best_step": self.best.step,
            },
            documents_digest=self._documents.digest(),
        )
        metrics = held_out_metrics(self._backend, offset, self._held_back)
        kl = metrics["retention"]["kl"]
        if settings.retention_weight and kl > settings.max_kl:
            _log.warning(
                "%s: KL to the base is %.3f nats, above %.3f: its agent may follow instructions less well. "
                "Raise retention_weight, lower positions, or use it with a strength below 1",
                self._domain,
                kl,
                settings.max_kl,
            )
        return dataclasses.replace(offset, metrics=metrics)

    def _prepare(self) -> tuple[Iterator[list[Prepared]], Iterator[list[Prepared]], _Looks]:
        objective, settings = self.objective, self._settings
        chooser = random.Random(settings.seed)
        examples = objective.prepare(self._train_examples)
        held_back = objective.prepare(self._held_back)
        replies = []
        if settings.retention_weight:
            replies = base_replies(self._backend, "train", reply_tokens=TRAINING_REPLY_TOKENS)
        held_back_replies = base_replies(self._backend, "validation")
        return (
            _shuffled_batches(examples, settings.batch_size, chooser),
            _shuffled_batches(objective.prepare(replies, keep_base=True), settings.batch_size, chooser),
            _Looks(objective, held_back or examples, objective.prepare(held_back_replies, keep_base=True), settings),
        )

    def _progress(self, loss: float, look: _Look | None, started: float, first_step: float) -> TrainingProgress:
        now = time.monotonic()
        gain = None if look is None else 100 * (1 - math.exp(look.loss - self._base_loss))
        remaining = (now - first_step) / self.step * (self._settings.steps - self.step)
        kl = None if look is None else look.kl
        return TrainingProgress(self.step, self._settings.steps, loss, gain, kl, now - started, remaining)


class _Looks:
    """Measures δ on the validation documents and instructions."""

    def __init__(
        self, objective: Objective, documents: list[Prepared], replies: list[Prepared], settings: TrainingSettings
    ) -> None:
        self._objective, self._documents, self._replies = objective, documents, replies
        zero = torch.zeros(settings.positions, objective.hidden_size)
        self.base_loss = objective.document_loss(documents, zero)

    def look(self, step: int, delta: Tensor) -> _Look:
        now = delta.detach().clone()
        loss = self._objective.document_loss(self._documents, now)
        return _Look(step, now, loss, self._objective.divergence(self._replies, now))


def held_out_metrics(backend: TorchBackend, offset: DomainOffset, examples: Sequence[Example]) -> dict[str, Any]:
    """Gain on `examples` (left out when there are none) and retention on the test instructions."""
    metrics: dict[str, Any] = {
        "retention": measure_retention(backend, base_replies(backend, "test"), offset).as_json(),
        "documents": len({example.document for example in examples}),
    }
    if examples:
        without = perplexity(target_logprobs(backend, examples, None))
        with_offset = perplexity(target_logprobs(backend, examples, offset))
        metrics |= {
            "perplexity_without": without,
            "perplexity_with": with_offset,
            "gain_percent": 100 * (1 - with_offset / without),
        }
    return metrics


def _split(
    documents: Sequence[Document], validation: Documents | None, seed: int
) -> tuple[list[Document], list[Document]]:
    if validation is not None:
        return list(documents), validation.items
    if len(documents) < MIN_DOCUMENTS_TO_VALIDATE:
        _log.warning(
            "only %d documents: none are held back, so the gain on unseen text is not measured; "
            "about 100 documents are advised",
            len(documents),
        )
        return list(documents), []
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    count = held_back_count(len(shuffled))
    return shuffled[count:], shuffled[:count]


def held_back_count(documents: int) -> int:
    """How many of `documents` are held back for validation where none are given for it."""
    return 0 if documents < MIN_DOCUMENTS_TO_VALIDATE else min(MAX_VALIDATION_DOCUMENTS, documents // 6)


def _examples(
    backend: TorchBackend, documents: Sequence[Document], domain: str, settings: TrainingSettings
) -> list[Example]:
    examples, short = lay_out(
        documents, backend.tokenizer, settings.prompt_format, max_tokens=settings.max_tokens, seed=settings.seed
    )
    context = backend.capabilities.context_tokens
    fitting, too_long = within_context(examples, context)
    if short or too_long:
        _log.warning(
            "%s: left out %d documents that are too short and %d that exceed the context of %d tokens",
            domain,
            short,
            too_long,
            context,
        )
    if not fitting:
        raise DocumentError(
            f"domain {domain!r}: none of {len(documents)} documents can be used ({short} too short, "
            f"{too_long} too long for the context of {context} tokens); give texts of a few sentences"
        )
    return fitting


def _shuffled_batches(items: list[Prepared], size: int, chooser: random.Random) -> Iterator[list[Prepared]]:
    while True:
        order = list(items)
        chooser.shuffle(order)
        for start in range(0, max(len(order) - size + 1, 1), size):
            yield order[start : start + size]


def _set_rate(adam: torch.optim.Adam, settings: TrainingSettings, step: int) -> None:
    # Without a retention term this is the paper's recipe, whose rate is constant.
    if settings.retention_weight == 0:
        return
    cosine = 0.5 * (1 + math.cos(math.pi * (step - 1) / settings.steps))
    for group in adam.param_groups:
        group["lr"] = settings.learning_rate * (0.1 + 0.9 * cosine)
