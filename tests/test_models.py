"""From a model name to a loaded backend, and what is said on the way when it leads nowhere."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from offset_runtime import ModelSpec
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import InvalidRequestError, ModelNotFoundError, OffsetError
from offset_runtime.models import converted_gguf, load_backend, locate

MakeModel = Callable[..., PreTrainedModel]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def gguf_file(tmp_path: Path, make_model: MakeModel, make_tokenizer: MakeTokenizer) -> Path:
    """A whole GGUF file of a tiny Llama model with a byte-level tokenizer."""
    tokenizer = make_tokenizer(chat=True)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    model = make_model("llama", vocab_size=len(tokens))
    config = model.config
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path: Path, make_model: MakeModel, make_tokenizer: MakeTokenizer) -> Path:
    """A transformers folder of a tiny model."""
    path = tmp_path / "model"
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


# Names


def test_a_name_with_an_owner_is_a_hub_id_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("owner/model-1.5") == "owner/model-1.5"
    (tmp_path / "owner" / "model-1.5").mkdir(parents=True)
    assert locate("owner/model-1.5") == Path("owner/model-1.5")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere", "~/nowhere", "a/b/nowhere", "owner/nowhere.gguf"])
def test_other_names_that_lead_nowhere_list_what_there_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=rf"no model '{name}': .*smollm2-135m"):
        locate(name)


def test_the_fake_model_needs_no_file() -> None:
    assert load_backend(ModelSpec(base="fake")).name == "fake"
    assert load_backend(ModelSpec(base="nowhere", backend="fake")).name == "fake"


# GGUF files


def test_a_split_model_of_one_part_is_whole(gguf_file: Path, model_cache: Path) -> None:
    whole = gguf_file.rename(gguf_file.with_name("tiny-00001-of-00001.gguf"))
    backend = load_backend(ModelSpec(base=str(whole), backend="torch"))
    assert backend.capabilities.context_tokens == 128


def test_a_gguf_file_is_converted_once(gguf_file: Path, model_cache: Path, request: pytest.FixtureRequest) -> None:
    converted = converted_gguf(gguf_file)
    assert [path.name for path in model_cache.iterdir()] == [converted.name]
    request.getfixturevalue("never_read")
    assert converted_gguf(gguf_file) == converted
    moved = gguf_file.rename(gguf_file.parent / "cache" / "tiny.gguf")
    assert converted_gguf(moved) == converted


def test_a_converted_model_is_the_one_in_the_file(
    gguf_file: Path, model_cache: Path, make_tokenizer: MakeTokenizer
) -> None:
    backend = load_backend(ModelSpec(base=str(gguf_file), backend="torch"))
    text = "the law and the news"
    assert backend.tokenizer.encode(text) == make_tokenizer().encode(text)
    assert backend.capabilities.context_tokens == 128
    assert backend.tokenizer.eos_token_ids == {0}


def test_a_file_of_other_bytes_is_another_model(gguf_file: Path, model_cache: Path) -> None:
    first = converted_gguf(gguf_file)
    with gguf_file.open("ab") as stream:
        stream.write(b"\0")
    assert converted_gguf(gguf_file) != first


@pytest.mark.parametrize("kept_bytes", [0, 3, 8, 500, 20_000])
def test_a_damaged_gguf_file_is_named_and_leaves_nothing_behind(
    kept_bytes: int, gguf_file: Path, model_cache: Path
) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelNotFoundError, match=r"cannot read GGUF file .*tiny\.gguf.*Expected a whole GGUF file"):
        load_backend(ModelSpec(base=str(gguf_file), backend="torch"))
    assert list(model_cache.iterdir()) == []


@pytest.mark.parametrize("error", [SafetensorError("bad"), RuntimeError("bad"), ImportError("bad"), Exception("bad")])
def test_whatever_the_reader_raises_names_the_file(
    error: Exception, gguf_file: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelNotFoundError, match=r"cannot read GGUF file .*tiny\.gguf .*bad"):
        converted_gguf(gguf_file)


def test_a_folder_named_like_a_gguf_file_is_named(tmp_path: Path, model_cache: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"cannot read GGUF file .*model\.gguf"):
        load_backend(ModelSpec(base=str(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left"), Exception("No space left")]
)
def test_a_full_disk_names_the_cache_and_how_to_move_it(
    error: Exception, gguf_file: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: PreTrainedModel, where: Path) -> None:
        (where / "half.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(
        OffsetError, match=r"cannot write the model cache .*cache: .*No space.*OFFSET_RUNTIME_CACHE"
    ) as e:
        converted_gguf(gguf_file)
    assert not isinstance(e.value, ModelNotFoundError)
    assert list(model_cache.iterdir()) == []


@pytest.mark.usefixtures("never_read")
def test_a_cache_that_cannot_be_made_is_refused_before_the_model_is_read(gguf_file: Path, model_cache: Path) -> None:
    model_cache.write_text("a file, not a folder")
    with pytest.raises(OffsetError, match=r"cannot write the model cache .*cache: .*OFFSET_RUNTIME_CACHE"):
        converted_gguf(gguf_file)


def test_of_two_that_convert_at_once_the_last_takes_the_others_folder(
    gguf_file: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = LlamaForCausalLM.save_pretrained

    def overtaken(model: PreTrainedModel, where: Path) -> None:
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
        others.append(converted_gguf(gguf_file))
        save(model, where)

    others: list[Path] = []
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", overtaken)
    assert [converted_gguf(gguf_file)] == others
    assert list(model_cache.iterdir()) == others


# Devices, dtypes and the end of a model


@pytest.fixture
def backend(make_model: MakeModel, make_tokenizer: MakeTokenizer) -> Iterator[TorchBackend]:
    made = TorchBackend(make_model("llama"), make_tokenizer())
    yield made
    made.close()


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("abacus", "unknown device 'abacus'; expected one of 'cpu'"),
        ("", "unknown device ''; expected one of 'cpu'"),
        # No machine has that many.
        ("cuda:99", "device 'cuda:99' cannot be used here: .*Expected one of 'cpu'"),
        ("meta", "device 'meta' cannot be used here: .*Expected one of 'cpu'"),
    ],
)
def test_a_device_that_is_not_here_is_refused_before_the_model_is_read(
    device: str, complaint: str, folder: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        load_backend(ModelSpec(base=str(folder), device=device))


@pytest.mark.usefixtures("never_read")
@pytest.mark.parametrize("dtype", ["float99", "", "int8", "float8_e4m3fn", "nn"])
def test_a_dtype_no_model_computes_in_is_refused_before_the_model_is_read(dtype: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown dtype '{dtype}'; expected 'float32', 'bfloat16'"):
        load_backend(ModelSpec(base=str(folder), dtype=dtype))


def test_a_device_too_small_for_the_model_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: PreTrainedModel, where: torch.device) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(LlamaForCausalLM, "to", full)
    with pytest.raises(InvalidRequestError, match=r"model .* cannot be moved to device 'cpu': out of memory.*bfloat16"):
        load_backend(ModelSpec(base=str(folder), device="cpu"))


def test_closing_a_backend_releases_the_model(make_model: MakeModel, make_tokenizer: MakeTokenizer) -> None:
    model = make_model("llama")
    backend = TorchBackend(model, make_tokenizer())
    backend.forward([Chunk(backend.allocate(), (4, 5, 6))])
    weights = weakref.ref(model.get_input_embeddings().weight)
    del model
    backend.close()
    gc.collect()
    assert weights() is None
    assert backend.state_bytes() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda backend, sequence: backend.allocate(),
        lambda backend, sequence: backend.forward([Chunk(sequence, (4,))]),
        lambda backend, sequence: backend.fork(sequence),
        lambda backend, sequence: backend.truncate(sequence, 0),
        lambda backend, sequence: backend.length(sequence),
        lambda backend, sequence: backend.embed([4]),
        lambda backend, sequence: backend.model_bytes(),
        lambda backend, sequence: backend.model,
        lambda backend, sequence: backend.executor,
    ],
)
def test_a_closed_backend_says_so(use: Callable[[TorchBackend, int], object], backend: TorchBackend) -> None:
    sequence = backend.allocate()
    use(backend, sequence)
    backend.close()
    with pytest.raises(InvalidRequestError, match=r"this backend is closed .*load the model again"):
        use(backend, sequence)


def test_freeing_and_closing_after_the_end_do_nothing(backend: TorchBackend) -> None:
    sequence = backend.allocate()
    backend.close()
    backend.free(sequence)
    backend.close()
