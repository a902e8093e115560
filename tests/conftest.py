"""Fixtures that all tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from dequantise import dequantised
from transformers import AutoModelForCausalLM

from offset_runtime import DomainOffset, EngineSettings, LlamaCppOptions, ModelSpec, OffsetRuntime
from offset_runtime.backends.base import Backend
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.identity import BaseIdentity
from offset_runtime.model_cache import CACHE_VARIABLE
from offset_runtime.models import load_backend, locate
from offset_runtime.offset import Anchor, PromptFormat

# Threads of a matrix product wait without spinning. Where the machine has other work, two that spin make each
# step of the real model ten times slower. Read when torch is loaded, which is after this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says how busy the machine is, and nothing of the code.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Fixtures of tiny models, for tests that need tensors but no trained model.
pytest_plugins = ("tiny_models", "tiny_gguf")

MakeOffset = Callable[..., DomainOffset]


@pytest.fixture(scope="session")
def make_offset() -> MakeOffset:
    """Return the function that makes a random offset: normal rows of standard deviation `scale`."""

    def make(
        identity: BaseIdentity,
        domain: str = "x",
        positions: int = 3,
        anchor: Anchor = "turn",
        prompt_format: PromptFormat = "chat",
        seed: int = 0,
        scale: float = 0.5,
    ) -> DomainOffset:
        rows = np.random.default_rng(seed).normal(size=(positions, identity.hidden_size)) * scale
        return DomainOffset(
            domain=domain,
            tensor=rows.astype(np.float32),
            anchor=anchor,
            prompt_format=prompt_format,
            base=identity,
        )

    return make


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that this process keeps its models in."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a model is read."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the model was read"))


@pytest.fixture
def fake_runtime() -> Iterator[OffsetRuntime]:
    """A runtime on the fake backend, closed after the test."""
    with OffsetRuntime(FakeBackend()) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def smollm_torch() -> Iterator[TorchBackend]:
    """The real base model on torch, loaded once a session. Use it from one thread at a time."""
    backend = load_backend(ModelSpec(base="smollm2-135m", backend="torch"))
    assert isinstance(backend, TorchBackend)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def smollm_llama() -> Iterator[LlamaCppBackend]:
    """The real base model on llama.cpp, its weights in float32, loaded once a session. Use it from one thread."""
    source = locate("smollm2-135m")
    assert isinstance(source, Path)
    with tempfile.TemporaryDirectory() as folder:
        path = dequantised(source, Path(folder) / "smollm2.gguf")
        # Flash attention rounds a decode step otherwise than the same token in a prompt: by 5e-3 in a log-probability.
        backend = LlamaCppBackend(path, LlamaCppOptions(type_k="f32", type_v="f32", flash_attn=False))
        yield backend
        backend.close()


@pytest.fixture(scope="session", params=["torch", "llama_cpp"])
def smollm(request: pytest.FixtureRequest) -> Backend:
    """The real base model, on one backend after the other."""
    name = {"torch": "smollm_torch", "llama_cpp": "smollm_llama"}[request.param]
    backend: Backend = request.getfixturevalue(name)
    return backend


@pytest.fixture(scope="session")
def smollm_runtime(smollm: Backend) -> Iterator[OffsetRuntime]:
    """A runtime on `smollm`, without a prefix cache. Between tests its engine is idle, and `smollm` free for use."""
    runtime = OffsetRuntime(smollm, settings=EngineSettings(cache_bytes=0))
    yield runtime
    runtime.engine.close()
