"""Log-probabilities of given tokens equal those of the plainest way to compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from offset_runtime import DomainOffset
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import PlacementError
from offset_runtime.layout import Example
from offset_runtime.placement import place
from offset_runtime.sampling import log_softmax
from offset_runtime.scoring import (
    Array,
    batches,
    distributions_under,
    perplexity,
    pick_targets,
    target_distributions,
    target_logprobs,
)

MakeOffset = Callable[..., DomainOffset]

EXAMPLES = [
    Example(tuple(b"Write a text: the court"), tuple(b"the court held")),
    Example(tuple(b"Go on."), tuple(b"yes, and so it went on for a while")),
    Example((), tuple(b"a document alone")),
    Example((65,), tuple(b"after a start token")),
]


class CountingBackend(FakeBackend):
    """Counts the tokens that are fed."""

    fed = 0

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        self.fed += sum(len(chunk.token_ids) for chunk in chunks)
        return super().forward(chunks)


def plain(backend: Backend, example: Example, offset: DomainOffset | None) -> Array:
    """One sequence, one pass over everything."""
    sequence = backend.allocate()
    placements = () if offset is None else (place(offset, example.anchored_tokens),)
    [logits] = backend.forward([Chunk(sequence, example.token_ids[:-1], placements, "all")])
    backend.free(sequence)
    return log_softmax(logits[-len(example.targets) :])


@pytest.mark.parametrize("anchor", ["sequence", "turn"])
@pytest.mark.parametrize("positions", [1, 3])
def test_distributions_equal_the_plain_ones(make_offset: MakeOffset, anchor: str, positions: int) -> None:
    backend = FakeBackend()
    offset = make_offset(backend.identity, anchor=anchor, positions=positions)
    examples = EXAMPLES if positions == 1 or anchor == "sequence" else EXAMPLES[:3]
    for column in (None, offset):
        found = list(target_distributions(backend, examples, column))
        for example, distributions in zip(examples, found, strict=True):
            assert distributions.shape == (len(example.targets), backend.identity.vocab_size)
            np.testing.assert_array_equal(distributions, plain(backend, example, column))
    assert backend.open_sequences == 0


def test_many_columns_equal_each_alone_and_share_what_lies_before_the_first_placement(make_offset: MakeOffset) -> None:
    backend = CountingBackend()
    turns = [make_offset(backend.identity, positions=k, seed=k) for k in (1, 4)]
    start = make_offset(backend.identity, anchor="sequence", positions=2)
    columns = [None, *turns, start]
    found: dict[int, list[Array]] = {}
    for batch, column, distributions in distributions_under(backend, EXAMPLES[:2], columns):
        assert batch == EXAMPLES[:2]
        found[column] = distributions
    shared, backend.fed = backend.fed, 0
    for column, offset in enumerate(columns):
        for example, distributions in zip(EXAMPLES[:2], found[column], strict=True):
            np.testing.assert_array_equal(distributions, plain(backend, example, offset))
    heads = sum(len(example.prompt_ids) - 4 for example in EXAMPLES[:2])
    # The plain base and the two turn-anchored offsets read each head once between them.
    assert backend.fed - shared == 2 * heads
    assert backend.open_sequences == 0


def test_a_model_whose_prompts_cannot_be_split_is_fed_in_one_piece(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    backend.capabilities = replace(backend.capabilities, split_prefill=False, fork=False)
    offset = make_offset(backend.identity)
    found = [distributions for _, _, distributions in distributions_under(backend, EXAMPLES[:3], [None, offset])]
    for example, without, ours in zip(EXAMPLES[:3], *found, strict=True):
        np.testing.assert_array_equal(without, plain(backend, example, None))
        np.testing.assert_array_equal(ours, plain(backend, example, offset))


def test_sequences_are_freed_when_the_reader_stops_early_or_the_model_fails(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    offset = make_offset(backend.identity)
    walk = distributions_under(backend, EXAMPLES[:2], [None, offset])
    next(walk)
    walk.close()
    assert backend.open_sequences == 0

    def broken(chunks: object) -> list[Array]:
        raise RuntimeError("no memory")

    backend.forward = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="no memory"):
        target_logprobs(backend, EXAMPLES, None)
    assert backend.open_sequences == 0


def test_an_offset_with_more_positions_than_the_prompt_has_tokens_is_an_error(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    offset = make_offset(backend.identity, domain="legal", positions=9)
    with pytest.raises(PlacementError, match="'legal' covers the last 9 prompt tokens, but the prompt has 6"):
        target_logprobs(backend, EXAMPLES[:2], offset)


def test_target_logprobs_pick_the_target_tokens() -> None:
    backend = FakeBackend()
    [found] = target_logprobs(backend, EXAMPLES[:1], None)
    expected = plain(backend, EXAMPLES[0], None)
    assert found.dtype == np.float32
    assert found.tolist() == [expected[i, token] for i, token in enumerate(EXAMPLES[0].targets)]
    assert found.tolist() == pick_targets(EXAMPLES[0], expected).tolist()


def test_no_examples_give_no_results() -> None:
    assert target_logprobs(FakeBackend(), [], None) == []


def test_batches_keep_order_and_limit() -> None:
    sizes = [30, 20, 20, 50, 5]
    assert [list(run) for run in batches(sizes, tokens=60)] == [[0, 1], [2], [3, 4]]
    assert [list(run) for run in batches(sizes, tokens=1000)] == [[0, 1, 2, 3, 4]]
    assert list(batches([], tokens=60)) == []


def test_an_item_longer_than_the_limit_is_a_batch_of_its_own() -> None:
    assert [list(run) for run in batches([7, 9, 8], tokens=1)] == [[0], [1], [2]]


def test_a_batch_has_no_more_items_than_sequences() -> None:
    assert [list(run) for run in batches([1] * 5, tokens=100, sequences=2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_sequences_give_the_same_figures(most: int, make_offset: MakeOffset) -> None:
    def found(backend: FakeBackend) -> list[np.ndarray]:
        offset = make_offset(backend.identity, positions=1)
        return [rows for _, _, found in distributions_under(backend, EXAMPLES, [None, offset]) for rows in found]

    few, many = found(FakeBackend(max_sequences=most)), found(FakeBackend())
    key = [float(rows.sum()) for rows in many]
    assert sorted(float(rows.sum()) for rows in few) == pytest.approx(sorted(key))


def test_batches_leave_room_for_heads_and_forks_where_state_is_bounded(make_offset: MakeOffset) -> None:
    backend = FakeBackend(kv_capacity_tokens=100)
    offset = make_offset(backend.identity, positions=1)
    for batch, _, _ in distributions_under(backend, EXAMPLES, [None, offset]):
        assert 2 * sum(len(example.token_ids) for example in batch) <= 100


def test_perplexity_is_over_tokens_and_not_over_documents() -> None:
    arrays = [np.log(np.full(3, 0.5, np.float32)), np.log(np.full(1, 0.125, np.float32))]
    assert perplexity(arrays) == pytest.approx(2 ** ((3 * 1 + 3) / 4))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with a minimal chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    return fast


def tiny_llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **shape))


def tiny_mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=32, state_size=4, num_hidden_layers=2))


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_mamba])
def test_transformers_models_score_as_in_one_plain_pass(
    make_offset: MakeOffset, make_model: Callable[[], PreTrainedModel]
) -> None:
    torch.manual_seed(0)
    backend = TorchBackend(make_model(), tiny_tokenizer())
    turn, start = make_offset(backend.identity), make_offset(backend.identity, anchor="sequence")
    offsets = [None, turn, start, turn.scaled(0), start.scaled(0)]
    columns: list[list[Array]] = [[] for _ in offsets]
    for _, column, distributions in distributions_under(backend, EXAMPLES[:3], offsets):
        columns[column] = distributions
    for offset, found in zip(offsets, columns, strict=True):
        for example, distributions in zip(EXAMPLES[:3], found, strict=True):
            np.testing.assert_allclose(distributions, plain(backend, example, offset), atol=1e-5)
    for example, *parts in zip(EXAMPLES[:3], *columns, strict=True):
        base, under_turn, under_start, *under_zero = parts
        # A document alone ends where a turn would begin, so there a turn anchor touches nothing it predicts.
        assert np.abs(under_turn - base).max() > 1e-4 or not example.prompt_ids
        assert np.abs(under_start - base).max() > 1e-4
        assert all(np.array_equal(zero, base) for zero in under_zero)
    assert backend.state_bytes() == 0
