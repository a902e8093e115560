"""Which domain finds a text the likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from offset_runtime.offset import DomainOffset, PromptFormat
from offset_runtime.runtime import OffsetRuntime, Score


@dataclass(frozen=True, slots=True)
class RankedScore:
    """Log-likelihood of a text under a domain (None: the plain base), beside the base in the same format.

    `tokens` scored; `logprob` and `base_logprob` in nats, over all of them.
    """

    domain: str | None
    prompt_format: PromptFormat
    tokens: int
    logprob: float
    base_logprob: float

    @property
    def logprob_per_token(self) -> float:
        return self.logprob / max(self.tokens, 1)

    @property
    def difference_per_token(self) -> float:
        """Nats a token by which the domain finds the text more likely than the base does."""
        return (self.logprob - self.base_logprob) / max(self.tokens, 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "prompt_format": self.prompt_format,
            "tokens": self.tokens,
            "logprob": self.logprob,
            "logprob_per_token": self.logprob_per_token,
            "difference_per_token": self.difference_per_token,
        }


def rank_domains(
    runtime: OffsetRuntime, texts: Sequence[str], domains: Sequence[str | DomainOffset]
) -> list[RankedScore]:
    """Score `texts` under each domain and under the plain base; the domain that finds them likeliest comes first.

    The order is that of the difference to the base in the same prompt format: log-likelihoods of
    different formats do not compare. Raises what `OffsetRuntime.score` raises.
    """
    offsets = [offset for domain in domains if (offset := runtime.offset(domain)) is not None]
    # An offset of strength 0 is the base, laid out in that offset's prompt format.
    plain: list[DomainOffset | None] = [*{offset.prompt_format: offset.scaled(0) for offset in offsets}.values()]
    plain = plain or [None]
    columns = zip(*(runtime.score(text, [*plain, *offsets]) for text in texts), strict=True)
    scores = [_total(column) for column in columns]
    base = {score.prompt_format: score.logprob for score in scores[: len(plain)]}
    names = [None] * len(plain) + [offset.domain for offset in offsets]
    ranked = [
        RankedScore(name, s.prompt_format, s.tokens, s.logprob, base[s.prompt_format])
        for name, s in zip(names, scores, strict=True)
    ]
    return sorted(ranked, key=lambda score: -score.difference_per_token)


def _total(scores: Sequence[Score]) -> Score:
    first = scores[0]
    return Score(first.domain, first.prompt_format, sum(s.tokens for s in scores), sum(s.logprob for s in scores))


def ranking_table(scores: Sequence[RankedScore], model: str) -> Table:
    """One line a domain, the likeliest first; the plain base is dim. `model` says which base, on which backend."""
    table = Table(title=f"Log-likelihood in nats, {model}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", justify="right")
    table.add_column("domain", style="bold")
    table.add_column("format")
    for heading in ("tokens", "total", "per token", "above base per token"):
        table.add_column(heading, justify="right")
    for place, score in enumerate(scores, start=1):
        table.add_row(
            str(place),
            score.domain or "plain base",
            score.prompt_format,
            str(score.tokens),
            f"{score.logprob:.2f}",
            f"{score.logprob_per_token:.4f}",
            f"{score.difference_per_token:+.4f}",
            style=None if score.domain else "dim",
        )
    return table
