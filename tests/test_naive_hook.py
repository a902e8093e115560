"""Why an offset is applied by position: added in every pass, by a hook, it makes text degenerate; here it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from offset_runtime import DomainOffset, OffsetRuntime, Request, SamplingParams
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.models import converted_gguf, locate

pytestmark = pytest.mark.real_model

MakeOffset = Callable[..., DomainOffset]

REPLY_TOKENS = 60
INSTRUCTIONS = (
    "Write the lead paragraph of a story about a harbour that is to be rebuilt after a storm.",
    "Explain why leaves are green.",
    "Describe a day in a small town.",
)


@pytest.fixture(scope="module")
def torch_runtime(smollm_torch: TorchBackend) -> Iterator[OffsetRuntime]:
    """A runtime on the weights that transformers runs beside it."""
    runtime = OffsetRuntime(smollm_torch)
    yield runtime
    runtime.engine.close()


@pytest.fixture(scope="module")
def offset(torch_runtime: OffsetRuntime, make_offset: MakeOffset) -> DomainOffset:
    """A strong random offset, its rows a quarter longer than embeddings; to see a trained one, load its file here.

    Of four seeds tried, three show the effect as clearly as the limits below ask; this is one of them.
    Small rows hide the fault for a while: those of examples/newsroom, a third as long as embeddings, let a hook
    write 60 tokens that are no more repetitive than ours.
    """
    return make_offset(torch_runtime.backend.identity, "news", positions=3, anchor="sequence", scale=1 / 6)


@pytest.fixture(scope="module")
def plain_model() -> PreTrainedModel:
    """The base model as transformers alone runs it."""
    return AutoModelForCausalLM.from_pretrained(converted_gguf(locate("smollm2-135m")), dtype=torch.float32).eval()


def distinct_pairs(ids: Sequence[int]) -> float:
    """Distinct-2: different pairs of neighbouring tokens, as a share of all pairs."""
    pairs = list(pairwise(ids))
    return len(set(pairs)) / max(len(pairs), 1)


def repeated(ids: Sequence[int]) -> float:
    """Share of tokens that came among the eight before."""
    return sum(token in ids[max(0, i - 8) : i] for i, token in enumerate(ids)) / max(len(ids), 1)


def chat(runtime: OffsetRuntime, text: str, max_tokens: int, offset: DomainOffset | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return runtime.chat_request([{"role": "user", "content": text}], domain=offset, sampling=sampling)


def generated(model: PreTrainedModel, request: Request) -> tuple[int, ...]:
    """Greedy reply of transformers' own cached decoding."""
    ids = torch.tensor([request.prompt_ids])
    limit = request.sampling.max_tokens
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, pad_token_id=2
    )
    return tuple(int(token) for token in out[0, ids.shape[1] :])


def test_a_hook_at_every_step_degenerates_and_the_runtime_does_not(
    torch_runtime: OffsetRuntime, plain_model: PreTrainedModel, offset: DomainOffset
) -> None:
    rows = torch.tensor(offset.tensor)

    def naive(module: torch.nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        """Add the rows to the first positions of the pass, which in cached decoding is the newest token."""
        tokens = min(embeddings.shape[1], rows.shape[0])
        return torch.cat([embeddings[:, :tokens] + rows[:tokens], embeddings[:, tokens:]], dim=1)

    requests = [chat(torch_runtime, text, REPLY_TOKENS, offset) for text in INSTRUCTIONS]
    streams = [torch_runtime.stream(request) for request in requests]
    ours = [stream.result().token_ids for stream in streams]
    handle = plain_model.get_input_embeddings().register_forward_hook(naive)
    try:
        hooked = [generated(plain_model, request) for request in requests]
    finally:
        handle.remove()
    pairs = [sum(map(distinct_pairs, replies)) / len(replies) for replies in (ours, hooked)]
    repeats = [sum(map(repeated, replies)) / len(replies) for replies in (ours, hooked)]
    assert pairs[0] > 0.8, f"ours repeats itself: distinct-2 {pairs[0]:.2f}"
    assert pairs[1] < 0.4, f"the naive hook does not repeat itself: distinct-2 {pairs[1]:.2f}"
    assert repeats[0] < 0.25, f"ours repeats itself: repetition rate {repeats[0]:.2f}"
    assert repeats[1] > 0.6, f"the naive hook does not repeat itself: repetition rate {repeats[1]:.2f}"


def test_without_an_offset_the_runtime_writes_what_transformers_writes(
    torch_runtime: OffsetRuntime, plain_model: PreTrainedModel
) -> None:
    request = chat(torch_runtime, INSTRUCTIONS[1], 24)
    assert torch_runtime.run(request).token_ids == generated(plain_model, request)
