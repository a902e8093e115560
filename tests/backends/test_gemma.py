"""Gemma 3 on llama.cpp: an architecture whose token embeddings are scaled, and embedding input is not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dequantise import dequantised

from offset_runtime import DomainOffset, LlamaCppOptions, SamplingParams
from offset_runtime.backends import conformance
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.conformance import BEHAVIOURS
from offset_runtime.backends.embedding_table import EmbeddingTable
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.models import locate
from offset_runtime.placement import Placement
from offset_runtime.runtime import OffsetRuntime

pytestmark = pytest.mark.real_model

# Its rows are scaled by the root of 640, so an offset must be as much larger to be felt.
OFFSET_SIZE = 3 * 640**0.5
# The token of a text that is given an offset.
AT = 4


@pytest.fixture(scope="module")
def path() -> Path:
    found = locate("gemma3-270m")
    assert isinstance(found, Path)
    return found


@pytest.fixture(scope="module")
def gemma(path: Path) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(path, LlamaCppOptions(n_ctx=1024))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def exact_gemma(path: Path) -> Iterator[LlamaCppBackend]:
    """The same weights in float32."""
    with tempfile.TemporaryDirectory() as folder:
        target = dequantised(path, Path(folder) / "gemma.gguf")
        backend = LlamaCppBackend(target, LlamaCppOptions(n_ctx=1024, type_k="f32", type_v="f32"))
        yield backend
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_contract(behaviour: str, exact_gemma: LlamaCppBackend) -> None:
    # llama.cpp looks its activation function up in a table of half-precision numbers.
    conformance.check(behaviour, lambda: exact_gemma, tolerance=5e-3, offset_size=OFFSET_SIZE)


def test_a_zero_offset_changes_no_bit_of_the_quantised_model_s_logits(gemma: LlamaCppBackend) -> None:
    conformance.check("zero offset changes nothing", lambda: gemma)


def test_the_offset_is_added_to_the_scaled_row(gemma: LlamaCppBackend) -> None:
    """The difference of two tokens' scaled rows, added to the one, makes the model read the other."""
    ids = gemma.tokenizer.encode("The capital of France is Rome and the capital of")
    other = [*ids[:AT], *gemma.tokenizer.encode(" Berlin"), *ids[AT + 1 :]]
    assert len(other) == len(ids)
    rows = EmbeddingTable(gemma.path).rows([other[AT], ids[AT]]) * np.float32(640**0.5)
    offset = DomainOffset("swap", (rows[0] - rows[1])[None], "sequence", "raw", gemma.identity)
    expected = logits(gemma, other, None)
    plain = logits(gemma, ids, None)
    found = logits(gemma, ids, offset)
    assert float(np.abs(found - expected).max()) < 0.1 * float(np.abs(plain - expected).max())


def test_it_continues_a_text(gemma: LlamaCppBackend) -> None:
    runtime = OffsetRuntime(gemma)
    request = runtime.text_request("Monday, Tuesday, Wednesday,", sampling=SamplingParams(max_tokens=4))
    assert request.prompt_ids[0] == gemma.tokenizer.bos_token_id
    assert "Thursday" in runtime.run(request).text
    runtime.engine.close()


def logits(backend: LlamaCppBackend, ids: list[int], offset: DomainOffset | None) -> np.ndarray:
    """Logits behind `ids`, the offset on token `AT` of them."""
    sequence = backend.allocate()
    placements = () if offset is None else (Placement(AT, offset, 1),)
    [rows] = backend.forward([Chunk(sequence, ids, placements)])
    backend.free(sequence)
    return rows[0]
