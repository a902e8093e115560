"""From logits to a token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

Logits = npt.NDArray[np.float32]


class SamplingParams(BaseModel):
    """How a reply is drawn. The default is greedy, so that a run can be repeated.

    `max_tokens`: most tokens of the reply. `temperature` 0: the most likely token. `top_k` 0, `top_p`
    1, `min_p` 0: off. `repetition_penalty` > 1 makes tokens of the prompt and of the reply less likely
    (Keskar et al. 2019, https://arxiv.org/abs/1909.05858). `seed`: None draws one. `stop`: texts that
    end the reply and are left out of it. `logprobs`: 0 gives each token's own log-probability, n the n
    most likely ones too, None neither.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(default=256, ge=0)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=0)
    stop: tuple[str, ...] = ()
    logprobs: int | None = Field(default=None, ge=0, le=100)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string must not be empty")
        return value


class Sampler:
    """Draws the tokens of one reply: its own random state, independent of the batch it runs in."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed)
        self._seen = set(prompt_ids) if params.repetition_penalty != 1.0 else set()

    def sample(self, logits: Logits) -> int:
        """Choose a token from `logits` (vocabulary,). Raises `ValueError` when they hold NaN or no finite value."""
        params = self.params
        if params.repetition_penalty != 1.0:
            logits = self._penalised(logits)
        best = int(np.argmax(logits))
        if not math.isfinite(float(logits[best])):
            raise ValueError("the model returned logits that are not finite")
        token = best if params.temperature == 0.0 else self._draw(logits)
        if params.repetition_penalty != 1.0:
            self._seen.add(token)
        return token

    def _penalised(self, logits: Logits) -> Logits:
        seen = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
        adjusted = logits.copy()
        values = adjusted[seen]
        penalty = np.float32(self.params.repetition_penalty)
        adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
        return adjusted

    def _draw(self, logits: Logits) -> int:
        params = self.params
        with np.errstate(over="ignore"):
            # Relative to the best, so that a temperature near 0 gives -inf and not inf.
            scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
        keep = np.arange(scaled.size)
        if 0 < params.top_k < scaled.size:
            keep = np.argpartition(scaled, -params.top_k)[-params.top_k :]
        order = keep[np.argsort(-scaled[keep], kind="stable")]
        weights = np.exp(scaled[order] - scaled[order[0]])
        if params.top_p < 1.0:
            share = np.cumsum(weights) / weights.sum()
            # The token that crosses top_p belongs to the set.
            weights = weights[: int(np.searchsorted(share, params.top_p)) + 1]
        if params.min_p > 0.0:
            weights = weights[weights >= params.min_p * weights[0]]
        share = np.cumsum(weights)
        pick = int(np.searchsorted(share, self._random.random() * share[-1], side="right"))
        return int(order[min(pick, len(weights) - 1)])


def log_softmax(logits: Logits) -> npt.NDArray[np.float32]:
    """Log-probabilities of `logits` (…, vocabulary), the same shape, float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float32)


def top_logprobs(logprobs: npt.NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """The `count` most likely (token id, log-probability) of `logprobs` (vocabulary,), most likely first."""
    if count == 0:
        return []
    count = min(count, logprobs.size)
    best = np.argpartition(logprobs, -count)[-count:]
    return [(int(i), float(logprobs[i])) for i in best[np.argsort(-logprobs[best], kind="stable")]]
