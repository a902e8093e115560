"""What the cases run: prompts, offsets, and requests that run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.bench.case import LeftOutError
from offset_runtime.bench.workload import ROWS, check_room, endless_engine, prompt, random_offset, request, run_together
from offset_runtime.errors import GenerationError


class Counting(FakeBackend):
    """A fake backend that keeps how many sequences and tokens each forward pass had."""

    def __init__(self, script: Callable[[str], str | None] | None = None) -> None:
        super().__init__(script)
        self.steps: list[list[int]] = []

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        return super().forward(chunks)


class Failing(FakeBackend):
    """A fake backend that fails on chunks of more than one token."""

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        if any(len(chunk.token_ids) > 1 for chunk in chunks):
            raise RuntimeError("out of memory")
        return super().forward(chunks)


def test_a_prompt_has_the_tokens_asked_for_and_another_start_gives_other_ones() -> None:
    tokenizer = FakeBackend().tokenizer
    first, other = prompt(tokenizer, 700), prompt(tokenizer, 700, start=11)
    assert len(first) == len(other) == 700
    assert first[11:] == other[:-11]
    assert tokenizer.decode(first).startswith("The harbour lies")


def test_a_random_offset_fits_the_model_has_rows_of_norm_one_and_differs_by_number() -> None:
    identity = FakeBackend().identity
    offset = random_offset(identity, 3)
    identity.check(offset.base, domain=offset.domain)
    assert (offset.domain, offset.positions, offset.anchor) == ("bench-3", ROWS, "turn")
    assert np.linalg.norm(offset.tensor, axis=1) == pytest.approx(np.ones(ROWS))
    assert offset.digest != random_offset(identity, 4).digest
    assert offset.digest == random_offset(identity, 3).digest


def test_a_request_with_an_offset_places_it_at_the_end_of_the_prompt() -> None:
    offset = random_offset(FakeBackend().identity)
    placed = request(range(20), offset).placements
    assert [(placement.index, placement.rows) for placement in placed] == [(12, 8)]
    assert request(range(20)).placements == ()


def test_no_reply_ends_early_in_an_endless_engine() -> None:
    with endless_engine(FakeBackend(lambda text: "")) as engine:
        group = run_together(engine, [request(engine.backend.tokenizer.encode("Say nothing"), output_tokens=5)])
    assert len(group.completions[0].token_ids) == 5


def test_requests_that_run_together_share_every_step() -> None:
    backend = Counting()
    with endless_engine(backend) as engine:
        requests = [request(prompt(backend.tokenizer, 32, start=i), output_tokens=4) for i in range(8)]
        group = run_together(engine, requests)
    # The single token holds the engine while they are submitted.
    assert backend.steps == [[1], [32] * 8, [1] * 8, [1] * 8, [1] * 8]
    assert group.decode_tokens == 24
    assert 0 < group.decode_s < group.seconds
    assert backend.open_sequences == 0


def test_decode_of_one_request_is_counted_from_its_second_token_on() -> None:
    backend = FakeBackend()
    with endless_engine(backend) as engine:
        group = run_together(engine, [request(prompt(backend.tokenizer, 9), output_tokens=7)])
    assert group.decode_tokens == 6


def test_the_error_of_a_request_is_raised() -> None:
    backend = Failing()
    with endless_engine(backend) as engine, pytest.raises(GenerationError, match="out of memory"):
        run_together(engine, [request(prompt(backend.tokenizer, 9))])


def test_an_endless_engine_leaves_the_backend_as_it_was() -> None:
    backend = FakeBackend()
    with endless_engine(backend) as engine:
        assert not engine.backend.tokenizer.eos_token_ids
    assert backend.tokenizer.eos_token_ids
    sequence = backend.allocate()
    assert backend.forward([Chunk(sequence, (1,))])[0].shape[0] == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"context_tokens": 63}, "needs a context of 64 tokens; this model has 63"),
        ({"max_sequences": 7}, "needs 8 sequences at once; this model is loaded for 7"),
        ({"kv_capacity_tokens": 511}, "needs a KV cache of 512 tokens; this model is loaded with 511"),
    ],
)
def test_a_model_without_room_is_not_measured_at_another_thing(limits: dict[str, int], reason: str) -> None:
    backend = FakeBackend()
    check_room(backend, 64, sequences=8)
    backend.capabilities = replace(backend.capabilities, **limits)  # type: ignore[arg-type]
    with pytest.raises(LeftOutError, match=reason):
        check_room(backend, 64, sequences=8)
