"""How embeddings must be fed to llama.cpp on a given model, found out on the model itself.

A token's embedding row is scaled by some models, at different places: inside the embedding module of the
transformers model (Gemma, MiniCPM3), where offsets are added behind it, or after it (Granite), where they are
added before it. llama.cpp's graphs scale input embeddings as well (Gemma 1 and 2, Granite), or tokens alone
(Gemma 3). What is fed must come to the sum that the offset was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offset_runtime.placement import Placement

Logits = npt.NDArray[np.float32]

# Largest difference, relative to the largest logit, that rounding explains. Equal rows give equal bits; where the
# file's rows are undone with another rounding than llama.cpp's, quantised activations make up to this of it.
_TOLERANCE = 2e-2

# Architectures (as GGUF names them) whose graph in llama.cpp scales embedding input too, and whose transformers
# embedding module has scaled the row before an offset is added to it: by how much, None for the root of d.
_SCALED_ALWAYS = {"gemma": None, "gemma2": None, "minicpm3": 12.0}


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """llama.cpp is fed `row_factor` x row + `offset_factor` x offset row."""

    row_factor: float
    offset_factor: float


def add_rows(embeddings: npt.NDArray[np.float32], placement: Placement, start: int, factor: float) -> None:
    """Add, in place, `factor` times the rows of `placement` that fall on `embeddings` (n, d).

    `start` is the position of the first of `embeddings` in its sequence.
    """
    first = max(placement.index, start)
    last = min(placement.stop, start + embeddings.shape[0])
    if first < last:
        rows = placement.offset.tensor[first - placement.index : last - placement.index]
        embeddings[first - start : last - start] += rows * np.float32(factor)


def find_rule(
    architecture: str,
    hidden_size: int,
    declared_scale: float | None,
    expected: Logits,
    feed: Callable[[float], Logits],
) -> tuple[EmbeddingRule | None, float]:
    """Find the rule under which feeding rows gives the logits of feeding tokens.

    `expected` (n, vocabulary) are the logits of some tokens; `feed(factor)` gives those of `factor` times their
    rows. `declared_scale` is the embedding scale in the file's metadata. Returns the rule, or None where no
    factor will do, and the smallest difference seen, relative to the largest logit.
    """
    root = math.sqrt(hidden_size)
    largest = max(1.0, float(np.abs(expected).max()))
    smallest = math.inf
    for factor in dict.fromkeys([1.0, root, *([declared_scale] if declared_scale else [])]):
        gap = float(np.abs(feed(factor) - expected).max()) / largest
        # Not a number is never within the tolerance, so logits that are none are refused too.
        if gap <= _TOLERANCE:
            return _rule(architecture, factor, root), gap
        smallest = min(smallest, gap)
    return None, smallest


def _rule(architecture: str, factor: float, root: float) -> EmbeddingRule:
    if factor == 1.0 and architecture in _SCALED_ALWAYS:
        return EmbeddingRule(1.0, 1.0 / (_SCALED_ALWAYS[architecture] or root))
    # Where tokens alone are scaled, the offset is added behind the scale, as in the transformers module.
    return EmbeddingRule(factor, 1.0)
