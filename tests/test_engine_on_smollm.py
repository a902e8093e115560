"""Sixteen agents in four domains on the real base model: each reply equals its solo run, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from offset_runtime import EngineSettings, ModelSpec, OffsetRuntime, OffsetStore, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.conformance import NEAR_TIE
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import RequestCancelledError
from offset_runtime.stream import Stream

pytestmark = pytest.mark.real_model

OFFSETS = Path(__file__).parents[1] / "examples" / "newsroom" / "offsets"
# So that long prompts are cut and read beside the decode steps of others.
SMALL_STEPS = EngineSettings(max_step_tokens=48, cache_bytes=0)
DOMAINS = ("code", "computing", "news", "speech")

TASKS = (
    "Name three colours.",
    "Write the lead paragraph of a story about a harbour that is to be rebuilt after a storm.",
    "Explain in two sentences why leaves are green.",
    "What is a contract?",
)


@pytest.fixture
def runtime(smollm: Backend) -> Iterator[OffsetRuntime]:
    runtime = OffsetRuntime(smollm, settings=SMALL_STEPS)
    yield runtime
    runtime.engine.close()


@pytest.fixture
def requests(runtime: OffsetRuntime) -> list[Request]:
    return make_requests(runtime)


def make_requests(runtime: OffsetRuntime) -> list[Request]:
    """Sixteen requests in the four domains whose trained offsets the repository ships."""
    store = OffsetStore(OFFSETS)
    for domain in DOMAINS:
        runtime.register(store.get(domain))
    return [
        runtime.chat_request(
            [{"role": "user", "content": f"{TASKS[i // 4]}{' Please.' * (i % 3)}"}],
            domain=DOMAINS[i % 4],
            sampling=SamplingParams(max_tokens=8 + i % 5),
        )
        for i in range(16)
    ]


def parted(
    backend: Backend, request: Request, found: Sequence[int], expected: Sequence[int], near: float = NEAR_TIE
) -> str | None:
    """Say where two greedy replies part, unless the two best logits there are so close that either may win."""
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            sequence = backend.allocate()
            ids = [*request.prompt_ids, *expected[:step]]
            [rows] = backend.forward([Chunk(sequence, ids, request.placements)])
            backend.free(sequence)
            best, second = np.sort(rows[0])[[-1, -2]]
            return None if best - second <= near else f"token {step}: {one}, alone {other} ({best} / {second})"
    return None if len(found) == len(expected) else f"{len(found)} tokens, alone {len(expected)}"


def read(stream: Stream, most_tokens: int | None) -> tuple[int, ...]:
    """Token ids of a reply; after `most_tokens` of them it is cancelled."""
    ids: list[int] = []
    try:
        for delta in stream:
            ids.extend(delta.token_ids)
            if len(ids) == most_tokens:
                stream.cancel()
    except RequestCancelledError:
        assert most_tokens is not None
    return tuple(ids)


def check_replies(runtime: OffsetRuntime, requests: list[Request], near: float) -> None:
    """Run all at once, cancel five midway, and compare each with its solo run."""
    chooser = random.Random(5)
    limits = {index: chooser.randrange(1, 6) for index in chooser.sample(range(16), 5)}
    streams = [runtime.stream(request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(read, streams, [limits.get(index) for index in range(16)]))
    assert runtime.backend.state_bytes() == 0
    assert sum(len(ids) for ids in found) < sum(request.sampling.max_tokens for request in requests)
    replies = set()
    for index, (request, ids) in enumerate(zip(requests, found, strict=True)):
        alone = runtime.run(request)
        replies.add(alone.text)
        expected = alone.token_ids[: len(ids)] if index in limits else alone.token_ids
        assert parted(runtime.backend, request, ids, expected, near) is None
    assert len(replies) > 8


def test_agents_in_one_batch_with_cancels_give_what_each_gives_alone(
    runtime: OffsetRuntime, requests: list[Request]
) -> None:
    check_replies(runtime, requests, NEAR_TIE)


def test_on_quantised_weights_replies_part_only_where_two_words_are_nearly_as_likely() -> None:
    """llama.cpp rounds activations to 8 bits, which makes of a last bit a difference that is seen."""
    with OffsetRuntime.load(ModelSpec(base="smollm2-135m", backend="llama_cpp"), settings=SMALL_STEPS) as runtime:
        check_replies(runtime, make_requests(runtime), near=1.0)


def test_a_solo_run_equals_a_full_prefill(runtime: OffsetRuntime, requests: list[Request]) -> None:
    for request in requests[:4]:
        ids = list(runtime.run(request).token_ids)
        sequence = runtime.backend.allocate()
        chunk = Chunk(sequence, [*request.prompt_ids, *ids[:-1]], request.placements, "all")
        [rows] = runtime.backend.forward([chunk])
        runtime.backend.free(sequence)
        plain = [int(row.argmax()) for row in rows[len(request.prompt_ids) - 1 :]]
        assert parted(runtime.backend, request, ids, plain) is None


def test_agents_that_read_one_transcript_write_what_they_write_without_a_cache(
    smollm: Backend, runtime: OffsetRuntime
) -> None:
    with_cache = OffsetRuntime(smollm, settings=EngineSettings(max_step_tokens=48))
    store = OffsetStore(OFFSETS)
    messages = [{"role": "user", "content": TASKS[1]}]
    cached = 0
    for turn in range(6):
        domain = store.get(DOMAINS[turn % 3])
        request = runtime.chat_request(messages, domain=domain, sampling=SamplingParams(max_tokens=10))
        found, expected = with_cache.run(request), runtime.run(request)
        assert parted(smollm, request, found.token_ids, expected.token_ids) is None
        cached += found.usage.cached_tokens
        messages += [
            {"role": "assistant", "content": expected.text},
            {"role": "user", "content": f"Go on, in {turn + 2} words."},
        ]
    with_cache.engine.close()
    # All but the author's own last positions and the newest turn was read once.
    assert cached > 0.6 * sum(len(request.prompt_ids) for _ in range(4))
    assert smollm.state_bytes() == 0


def test_a_prompt_restored_in_a_new_backend_goes_on_as_a_cold_one(
    smollm: Backend, runtime: OffsetRuntime, requests: list[Request], tmp_path: Path
) -> None:
    with_cache = OffsetRuntime(smollm)
    found = [with_cache.run(request) for request in requests[:2]]
    assert with_cache.save_state(tmp_path) == 2
    with_cache.engine.close()
    # Another one on the same weights, as another process would make it.
    other: Backend
    if isinstance(smollm, TorchBackend):
        other = TorchBackend(smollm.model, smollm.tokenizer._tokenizer)
    else:
        assert isinstance(smollm, LlamaCppBackend)
        other = LlamaCppBackend(smollm.path, smollm.options)
    restored = OffsetRuntime(other)
    assert restored.restore_state(tmp_path) == 2
    for request, cold in zip(requests, found, strict=False):
        reply = restored.run(request)
        assert reply.usage.cached_tokens == len(request.prompt_ids) - 1
        assert parted(smollm, request, reply.token_ids, cold.token_ids) is None
    restored.engine.close()
    if other.name == "llama_cpp":
        # Torch's shares its model with `smollm`.
        other.close()
