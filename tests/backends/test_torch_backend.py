"""The torch backend against the model's own plain forward pass, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from offset_runtime import DomainOffset
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.executors import RecurrentExecutor
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import (
    BaseModelMismatchError,
    ContextOverflowError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from offset_runtime.placement import Placement, place

pytestmark = pytest.mark.usefixtures("one_thread")

MakeModel = Callable[..., PreTrainedModel]
MakeOffset = Callable[..., DomainOffset]
TinyBackends = Callable[[str], TorchBackend]

ARCHITECTURES = ("llama", "gpt_neox", "gpt2", "qwen2", "qwen3", "mistral", "granite", "gemma2", "gemma3")
ARCHITECTURES += ("mamba", "mamba2", "lfm2", "jamba", "bloom")
PROMPTS = ([7, 90, 41, 300, 12, 12, 250, 33, 8, 77, 160, 161, 45, 9, 230], [5, 19, 4], [200, 100, 50, 25, 12, 6, 3, 9])


def plain_logits(model: PreTrainedModel, ids: Sequence[int], placements: Sequence[Placement]) -> np.ndarray[Any, Any]:
    """Logits of the model's own forward pass over embeddings with the rows added by hand."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(torch.tensor([ids]))
        for placement in placements:
            rows = torch.tensor(placement.offset.tensor[: placement.rows])
            embeddings[0, placement.index : placement.stop] += rows
        logits = model(inputs_embeds=embeddings, use_cache=False).logits[0]
    return np.asarray(logits.float().numpy())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixed_batch_gives_the_models_own_logits(
    architecture: str, attention: str, tiny_backends: TinyBackends, make_model: MakeModel, make_offset: MakeOffset
) -> None:
    backend, model = tiny_backends(architecture), make_model(architecture)
    if attention == "sdpa" and not model._supports_sdpa:
        attention = "eager"
    model.set_attn_implementation(attention)
    offsets = [make_offset(backend.identity, seed=i, positions=i + 1, scale=1.0) for i in range(3)]
    placements = [[Placement(2, offsets[1], 2), place(offsets[0], 15)], [], [place(offsets[2], 8)]]
    sequences = [backend.allocate() for _ in PROMPTS]
    # The first prompt in two chunks, cut inside its first placement, the second chunk beside the others' first.
    backend.forward([Chunk(sequences[0], PROMPTS[0][:3], placements[0], "none")])
    rest = [PROMPTS[0][3:], *PROMPTS[1:]]
    found = backend.forward(
        [Chunk(s, ids, placed, "all") for s, ids, placed in zip(sequences, rest, placements, strict=True)]
    )
    for rows, ids, placed in zip(found, PROMPTS, placements, strict=True):
        np.testing.assert_allclose(rows, plain_logits(model, ids, placed)[-len(rows) :], atol=1e-4)
    for sequence in sequences:
        backend.free(sequence)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "qwen2"])
def test_decode_far_beyond_the_sliding_window_gives_the_models_own_logits(
    architecture: str, tiny_backends: TinyBackends, make_model: MakeModel, make_offset: MakeOffset
) -> None:
    backend, model = tiny_backends(architecture), make_model(architecture)
    ids = [int(i) for i in np.random.default_rng(3).integers(5, 300, 40)]
    placement = place(make_offset(backend.identity, scale=1.0), 10)
    sequence = backend.allocate()
    rows = [backend.forward([Chunk(sequence, ids[:10], [placement], "all")])[0]]
    rows += [backend.forward([Chunk(sequence, [token])])[0] for token in ids[10:]]
    backend.free(sequence)
    np.testing.assert_allclose(np.concatenate(rows), plain_logits(model, ids, [placement]), atol=1e-4)


def test_a_sequence_that_outgrows_its_first_buffer_keeps_its_state(
    tiny_backends: TinyBackends, make_model: MakeModel
) -> None:
    backend, model = tiny_backends("llama"), make_model("llama")
    ids = [int(i) for i in np.random.default_rng(4).integers(5, 300, 128)]
    sequence, rows = backend.allocate(), []
    for start, stop in ((0, 50), (50, 63), (63, 64), (64, 65), (65, 128)):
        rows.append(backend.forward([Chunk(sequence, ids[start:stop], (), "all")])[0])
    backend.free(sequence)
    np.testing.assert_allclose(np.concatenate(rows), plain_logits(model, ids, []), atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "lfm2"])
def test_a_pass_that_fails_inside_the_model_leaves_no_trace(
    architecture: str, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model, plain = make_model(architecture), make_model(architecture)
    backend = TorchBackend(model, tiny_tokenizer)
    sequences = [backend.allocate(), backend.allocate()]
    for sequence in sequences:
        backend.forward([Chunk(sequence, PROMPTS[0][:6])])

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    # The first layer has written its state by then.
    last = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[-1]
    handle = last.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        backend.forward([Chunk(sequence, PROMPTS[2]) for sequence in sequences])
    handle.remove()
    assert [backend.length(sequence) for sequence in sequences] == [6, 6]
    found = backend.forward([Chunk(sequence, PROMPTS[0][6:], (), "all") for sequence in sequences])
    for rows in found:
        np.testing.assert_allclose(rows, plain_logits(plain, PROMPTS[0], [])[6:], atol=1e-4)


def test_a_window_that_only_the_mask_knows_is_not_packed_however_wide_it_is(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    # Wider than the few tokens of the proof at load, which would therefore not notice.
    model = make_model("phimoe", sliding_window=30)
    assert isinstance(TorchBackend(model, tiny_tokenizer).executor, RecurrentExecutor)


def test_the_window_of_the_test_models_matters(make_model: MakeModel) -> None:
    model = make_model("mistral")
    ids = [int(i) for i in np.random.default_rng(3).integers(5, 300, 30)]
    windowed = plain_logits(model, ids, [])
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert np.abs(windowed - plain_logits(model, ids, [])).max() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba2"])
def test_bfloat16_models_take_offsets_and_return_float32(
    architecture: str, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, make_offset: MakeOffset
) -> None:
    backend = TorchBackend(make_model(architecture).to(torch.bfloat16), tiny_tokenizer)
    offset = make_offset(backend.identity, scale=1.0)
    exact = make_model(architecture)
    ids = PROMPTS[0]
    sequences = [backend.allocate() for _ in range(3)]
    offsets: list[list[Placement]] = [[], [place(offset.scaled(0), len(ids))], [place(offset, len(ids))]]
    plain, zero, moved = backend.forward(
        [Chunk(s, ids, placed, "all") for s, placed in zip(sequences, offsets, strict=True)]
    )
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain, zero)
    expected = plain_logits(exact, ids, offsets[2])
    assert np.abs(moved - expected).max() < 0.1 * np.abs(expected).max()


def test_offset_rows_are_rounded_once(make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("llama").to(torch.bfloat16)
    backend = TorchBackend(model, tiny_tokenizer)
    row = np.full((1, 32), 1 + 2**-9, np.float32)
    offset = DomainOffset("x", row, "turn", "raw", backend.identity)
    embedded = backend.embed([9])
    expected = (embedded.float() + torch.from_numpy(row)).to(torch.bfloat16)
    chunk = Chunk(backend.allocate(), [9], [place(offset, 1)])
    assert torch.equal(backend._feed(chunk).embeddings, expected)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("gemma3n", "feeding embeddings changes the logits"),
        ("recurrent_gemma", "RecurrentExecutor computes other logits"),
    ],
)
def test_models_that_cannot_take_an_offset_are_refused(
    architecture: str, why: str, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture}.* cannot take domain offsets: .*{why}"):
        TorchBackend(make_model(architecture), tiny_tokenizer)


class NeedsIds(LlamaForCausalLM):
    """A model that reads its token ids beside their embeddings."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        if input_ids is None:
            raise ValueError("input_ids are required")
        return super().forward(input_ids=input_ids, **inputs)


class ScalesAfterLookup(LlamaForCausalLM):
    """A model that changes looked-up embeddings in a way that embeddings fed to it do not go through."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        if input_ids is not None:
            inputs_embeds = self.get_input_embeddings()(input_ids) * 4
        return super().forward(inputs_embeds=inputs_embeds, **inputs)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (NeedsIds, r"feeding embeddings fails \(input_ids are required\)"),
        (ScalesAfterLookup, "feeding embeddings changes the logits by up to"),
    ],
)
def test_models_whose_embeddings_do_not_replace_their_ids_are_refused(
    kind: type[LlamaForCausalLM], why: str, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = kind(make_model("llama").config)
    model.load_state_dict(make_model("llama").state_dict())
    with pytest.raises(UnsupportedModelError, match=why):
        TorchBackend(model, tiny_tokenizer)


def test_a_refused_model_keeps_its_own_attention(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_model("phimoe")
    before = model.config._attn_implementation
    TorchBackend(model, tiny_tokenizer)
    assert model.config._attn_implementation == before


def test_the_context_ends_where_longrope_would_turn_all_keys(tiny_backends: TinyBackends) -> None:
    assert tiny_backends("phi3").capabilities.context_tokens == 64


def test_a_chunk_beyond_the_context_is_refused_before_it_reaches_the_model(tiny_backends: TinyBackends) -> None:
    backend = tiny_backends("gpt2")
    sequence = backend.allocate()
    backend.forward([Chunk(sequence, [5] * 127)])
    with pytest.raises(ContextOverflowError, match=r"127 tokens \+ 2 more exceeds the context of 128"):
        backend.forward([Chunk(sequence, [5, 5])])
    assert backend.length(sequence) == 127
    backend.free(sequence)


def test_recurrent_state_is_not_cut_back(tiny_backends: TinyBackends) -> None:
    backend = tiny_backends("mamba")
    with pytest.raises(InvalidRequestError, match="recurrent state, which cannot be cut back"):
        backend.truncate(backend.allocate(), 0)


def test_state_grows_with_attention_and_not_with_recurrence(tiny_backends: TinyBackends) -> None:
    for architecture, grows in (("llama", True), ("mamba2", False), ("lfm2", True)):
        backend = tiny_backends(architecture)
        before = backend.state_bytes()
        sequence = backend.allocate()
        backend.forward([Chunk(sequence, [5] * 20)])
        short = backend.state_bytes() - before
        backend.forward([Chunk(sequence, [5] * 80)])
        long = backend.state_bytes() - before
        backend.free(sequence)
        assert short > 0
        assert (long > short) is grows
        assert backend.state_bytes() == before


def test_tied_weights_are_counted_once(make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("gemma2")
    assert model.config.tie_word_embeddings
    expected = sum(p.numel() * 4 for p in model.parameters())
    assert TorchBackend(model, tiny_tokenizer).model_bytes() == expected


def test_identity_tells_models_apart_and_equal_ones_not(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    one, same, other = (TorchBackend(make_model("llama", seed), tiny_tokenizer).identity for seed in (0, 0, 1))
    one.check(same, domain="x")
    with pytest.raises(BaseModelMismatchError, match="embedding rows at relative distance"):
        one.check(other, domain="x")


def test_the_tokenizer_adds_neither_start_token_nor_template(
    make_model: MakeModel, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    plain = TorchBackend(make_model("llama"), make_tokenizer()).tokenizer
    rich = TorchBackend(make_model("llama"), make_tokenizer(chat=True, bos=True)).tokenizer
    assert (plain.bos_token_id, plain.has_chat_template) == (None, False)
    assert (rich.bos_token_id, rich.has_chat_template) == (1, True)
    assert rich.encode("law") == plain.encode("law")
    assert rich.eos_token_ids == {0}
    rendered = rich.render_chat([{"role": "user", "content": "news"}])
    assert rendered == "<|im_start|>user\nnews<|im_end|>\n<|im_start|>assistant\n"
    ids = rich.encode(rendered)
    assert ids[0] == 2
    assert rich.decode(ids) == "user\nnews\nassistant\n"


def test_load_reads_a_folder(tmp_path: Path, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    make_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    backend = TorchBackend.load(tmp_path, dtype="bfloat16", device="cpu")
    again = TorchBackend.load(tmp_path)
    backend.identity.check(again.identity, domain="x")
    assert backend.model_bytes() * 2 == again.model_bytes()


def test_load_names_what_is_wrong(
    tmp_path: Path, make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ModelNotFoundError, match=r"cannot load model .*Expected a hub id, a folder"):
        TorchBackend.load(tmp_path)
    with pytest.raises(InvalidRequestError, match="unknown dtype 'float99'; expected 'float32'"):
        TorchBackend.load(tmp_path, dtype="float99")
    with pytest.raises(InvalidRequestError, match="unknown device 'abacus'"):
        TorchBackend.load(tmp_path, device="abacus")
    make_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelNotFoundError, match="cannot load model"):
        TorchBackend.load(tmp_path)


def test_backends_of_one_process_do_not_share_sequences(
    make_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = LlamaConfig(**make_model("llama").config.to_dict())
    one, other = (TorchBackend(LlamaForCausalLM(config), tiny_tokenizer) for _ in range(2))
    sequence = one.allocate()
    one.forward([Chunk(sequence, [4, 5, 6])])
    assert other.state_bytes() == 0
    with pytest.raises(InvalidRequestError, match="is not open"):
        other.length(sequence)
