"""Tiny models of the architectures people use keep the contract, each through the executor that fits it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from offset_runtime.backends import conformance
from offset_runtime.backends.executors import PackedExecutor, RecurrentExecutor
from offset_runtime.backends.torch import TorchBackend

PACKED = ("llama", "gpt_neox", "gpt2", "qwen2", "qwen3", "mistral", "granite", "gemma2", "gemma3", "phi3")
RECURRENT = ("mamba", "mamba2", "lfm2", "jamba", "bloom", "phimoe")

pytestmark = pytest.mark.usefixtures("one_thread")

TinyBackends = Callable[[str], TorchBackend]


@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
@pytest.mark.parametrize("architecture", [*PACKED, *RECURRENT])
def test_contract(architecture: str, behaviour: str, tiny_backends: TinyBackends) -> None:
    conformance.check(behaviour, partial(tiny_backends, architecture))


@pytest.mark.parametrize("architecture", PACKED)
def test_attention_models_run_packed(architecture: str, tiny_backends: TinyBackends) -> None:
    backend = tiny_backends(architecture)
    assert isinstance(backend.executor, PackedExecutor)
    assert backend.capabilities.truncate
    assert backend.capabilities.mixed_batch


@pytest.mark.parametrize("architecture", RECURRENT)
def test_other_models_run_on_a_state_a_sequence(architecture: str, tiny_backends: TinyBackends) -> None:
    backend = tiny_backends(architecture)
    assert isinstance(backend.executor, RecurrentExecutor)
    assert not backend.capabilities.truncate
    assert not backend.capabilities.mixed_batch


@pytest.mark.parametrize(("architecture", "continues"), [("mamba", False), ("jamba", False), ("mamba2", True)])
def test_scans_that_ignore_their_state_are_found_out(
    architecture: str, continues: bool, tiny_backends: TinyBackends
) -> None:
    assert tiny_backends(architecture).capabilities.split_prefill is continues
