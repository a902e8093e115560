"""Which base model is this, and may this offset be used on it?

An offset is learned against one embedding table and the weights behind it. The identity kept in an
offset file is small and survives quantisation: architecture, sizes, a digest of how a fixed text is
tokenised, and a sketch of some embedding rows that is compared with a tolerance.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

from offset_runtime.errors import BaseModelMismatchError

SKETCH_ROWS = 16
SKETCH_COLUMNS = 32

# Relative L2 distance between two sketches. 4-bit embedding tables measure about 0.08 from their
# full-precision source; tables of different models measure above 1.
SKETCH_TOLERANCE = 0.2

# Model types that a GGUF file holds under the name of another, whose graph is the same.
_GGUF_NAMES = {"mistral": "llama", "mixtral": "llama", "phi": "phi2", "cohere": "commandr", "falconmamba": "mamba"}

# Tokenisers that agree on this text agree on what an offset's documents looked like. Digesting the
# ids, and not the vocabulary, makes a model and its GGUF equal: GGUF files pad the vocabulary.
PROBE_TEXT = (
    "The court held that clause 4.2(b) applies; see Smith v. Jones, 1998.\n"
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2\n"
    "Größe, naïve, señor, Москва, 東京, 12,345.67 USD, e-mail: someone@example.org"
)


class BaseIdentity(BaseModel):
    """What an offset file remembers of its base model.

    `sketch` is base64 of SKETCH_ROWS x SKETCH_COLUMNS little-endian float16 values: the first
    columns of evenly spaced rows of the token embedding table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tokenizer_digest: str
    sketch: str

    @field_validator("sketch")
    @classmethod
    def _finite_numbers(cls, value: str) -> str:
        try:
            numbers = _sketch_rows(value)
        except (binascii.Error, ValueError) as error:
            raise ValueError("a sketch must be base64 of float16 numbers") from error
        if numbers.size == 0 or not np.isfinite(numbers).all():
            raise ValueError("a sketch must hold finite numbers")
        return value

    def check(self, offset_base: BaseIdentity, *, domain: str) -> None:
        """Raise `BaseModelMismatchError` unless an offset made for `offset_base` fits this model."""
        differences = []
        for field in ("architecture", "hidden_size", "vocab_size", "tokenizer_digest"):
            found, expected = getattr(offset_base, field), getattr(self, field)
            if field == "architecture":
                # An identity may come from a version that knew fewer names.
                found, expected = canonical_architecture(found), canonical_architecture(expected)
            if found != expected:
                differences.append(f"{field} {_short(found)} (this model: {_short(expected)})")
        if not differences:
            distance = sketch_distance(self.sketch, offset_base.sketch)
            if distance > SKETCH_TOLERANCE:
                differences.append(
                    f"embedding rows at relative distance {distance:.2f} "
                    f"(allowed: {SKETCH_TOLERANCE}, which covers quantisation)"
                )
        if differences:
            raise BaseModelMismatchError(
                f"the offset of domain {domain!r} was made for another base model: "
                f"{'; '.join(differences)}. Train it again on this model with "
                f"'offset-runtime train {domain}', or load the model it was made for."
            )


def sketch_row_ids(vocab_size: int) -> list[int]:
    """Token ids of the rows in a sketch: evenly spaced, away from the special tokens at both ends."""
    return [int(i) for i in np.linspace(vocab_size * 0.05, vocab_size * 0.9, SKETCH_ROWS)]


def make_identity(
    architecture: str,
    vocab_size: int,
    rows: npt.NDArray[np.float32],
    encode: Callable[[str], Sequence[int]],
) -> BaseIdentity:
    """Build the identity of a model.

    `rows` (SKETCH_ROWS, d) are the unscaled embedding rows of `sketch_row_ids(vocab_size)`;
    `encode` tokenises a text without special tokens.
    """
    ids = ",".join(str(i) for i in encode(PROBE_TEXT))
    sketch = np.ascontiguousarray(rows[:, :SKETCH_COLUMNS], dtype="<f2")
    return BaseIdentity(
        architecture=canonical_architecture(architecture),
        hidden_size=int(rows.shape[1]),
        vocab_size=vocab_size,
        tokenizer_digest=hashlib.sha256(ids.encode()).hexdigest(),
        sketch=base64.b64encode(sketch.tobytes()).decode("ascii"),
    )


def canonical_architecture(name: str) -> str:
    """Spell a model type as both transformers and GGUF would: ``gpt_neox`` -> ``gptneox``, ``mistral`` -> ``llama``."""
    spelled = re.sub(r"[^a-z0-9]", "", name.lower().removesuffix("_text"))
    return _GGUF_NAMES.get(spelled, spelled)


def sketch_distance(left: str, right: str) -> float:
    """Relative L2 distance of two sketches (0 = equal; inf when their sizes differ)."""
    a, b = _sketch_rows(left), _sketch_rows(right)
    if a.shape != b.shape:
        return float("inf")
    norm = max(float(np.linalg.norm(a)), 1e-12)
    return float(np.linalg.norm(a - b)) / norm


def _sketch_rows(sketch: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(sketch, validate=True), dtype="<f2").astype(np.float32)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "…"
