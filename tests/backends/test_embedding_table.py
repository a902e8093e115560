"""Rows of a GGUF file's embedding table equal those that llama.cpp reads, in every quantisation people use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp
from tiny_gguf import write_gguf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from offset_runtime import LlamaCppOptions
from offset_runtime.backends import conformance
from offset_runtime.backends.embedding_table import EmbeddingTable
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.errors import ModelNotFoundError

MakeModel = Callable[..., PreTrainedModel]

# Types as llama-quantize names them: of the embedding table, and of the file's other weights.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_NL")


@pytest.fixture(scope="module")
def wide_gguf(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: MakeModel,
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> Path:
    """A tiny llama whose rows of 256 numbers fill a block of every type."""
    model = make_model("llama", hidden_size=256, intermediate_size=256)
    return write_gguf(model, make_tokenizer(chat=True), tmp_path_factory.mktemp("wide") / "wide.gguf")


def quantised(source: Path, target: Path, kind: str) -> Path:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    parameters.token_embedding_type = gguf.GGMLQuantizationType[kind]
    parameters.output_tensor_type = gguf.GGMLQuantizationType.F32
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(target), parameters)
    assert status == 0
    return target


@pytest.mark.parametrize("kind", TYPES)
def test_a_zero_offset_changes_no_bit_of_the_logits(kind: str, wide_gguf: Path, tmp_path: Path) -> None:
    path = quantised(wide_gguf, tmp_path / f"{kind}.gguf", kind)
    table = EmbeddingTable(path)
    assert (table.type_name, table.size, table.width) == (kind, 320, 256)
    backend = LlamaCppBackend(path, LlamaCppOptions(n_ctx=256, n_threads=1))
    conformance.check("zero offset changes nothing", lambda: backend)
    backend.close()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_rows_are_those_that_the_gguf_package_reads(kind: str, wide_gguf: Path, tmp_path: Path) -> None:
    path = quantised(wide_gguf, tmp_path / f"{kind}.gguf", kind)
    [tensor] = [t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight"]
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(EmbeddingTable(path).rows([0, 319, 7, 7]), expected[[0, 319, 7, 7]])


def test_the_table_of_a_split_model_is_found_in_any_part(wide_gguf: Path, tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(first, "llama")
    writer.add_tensor("output_norm.weight", np.zeros(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(wide_gguf.read_bytes())
    assert EmbeddingTable(first).size == 320


def test_a_file_without_a_table_is_no_language_model(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("a", [[1, 2], [3]])
    writer.add_array("b", ["x", "yz"])
    writer.add_string("c", "text")
    writer.add_tensor("output_norm.weight", np.zeros(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelNotFoundError, match=r"other\.gguf holds no tensor token_embd\.weight"):
        EmbeddingTable(path)


@pytest.mark.parametrize("at", range(4, 400, 9))
def test_a_header_with_wrong_bytes_is_an_error_of_ours_or_none(at: int, wide_gguf: Path, tmp_path: Path) -> None:
    data = bytearray(wide_gguf.read_bytes())
    data[at : at + 4] = b"\xff\xff\xff\xff"
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    try:
        assert EmbeddingTable(path).width == 256
    except ModelNotFoundError as error:
        assert "wrong.gguf" in str(error)  # noqa: PT017 - either outcome is right
