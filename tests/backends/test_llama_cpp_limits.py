"""What llama.cpp cannot do becomes an error of ours, and nothing is lost by it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offset_runtime import LlamaCppOptions, OffsetRuntime, SamplingParams
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.errors import (
    ContextOverflowError,
    GenerationError,
    InvalidRequestError,
    KVCacheFullError,
    ModelNotFoundError,
    OutOfMemoryError,
)

TinyGguf = Callable[[str], Path]

SMALL = LlamaCppOptions(n_ctx=256, n_seq_max=3, n_threads=1, flash_attn=False, type_k="f32", type_v="f32")


@pytest.fixture
def backend(tiny_gguf: TinyGguf) -> Iterator[LlamaCppBackend]:
    backend = LlamaCppBackend(tiny_gguf("llama"), SMALL)
    yield backend
    backend.close()


def fill(backend: LlamaCppBackend, tokens: int) -> int:
    sequence = backend.allocate()
    backend.forward([Chunk(sequence, [20 + i % 200 for i in range(tokens)], (), "none")])
    return sequence


@pytest.mark.parametrize("kept", [0, 3, 100, 3000])
def test_a_file_cut_short_cannot_be_loaded(kept: int, tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_gguf("llama").read_bytes()[:kept])
    with pytest.raises(ModelNotFoundError, match=r"short\.gguf"):
        LlamaCppBackend(path)


def test_a_file_whose_weights_are_cut_off_is_refused_with_the_words_of_llama_cpp(
    tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny_gguf("llama").read_bytes()[:-4000])
    with pytest.raises(ModelNotFoundError, match=r"cannot load .*short\.gguf: .*(corrupted|incomplete|bounds)"):
        LlamaCppBackend(path)


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model at all, but some text of more than a few bytes")
    with pytest.raises(ModelNotFoundError, match=r"text\.gguf: it begins with b'this', expected b'GGUF'"):
        LlamaCppBackend(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        LlamaCppBackend(tmp_path / "none.gguf")


def test_a_kv_cache_beyond_the_memory_is_refused_before_it_is_taken(tiny_gguf: TinyGguf) -> None:
    with pytest.raises(OutOfMemoryError, match=r"n_ctx=4000000000.* takes .* GB, but .* GB of memory are free; lower"):
        LlamaCppBackend(tiny_gguf("llama"), SMALL.model_copy(update={"n_ctx": 4_000_000_000}))


def test_a_context_that_llama_cpp_refuses_is_reported_with_its_reason(tiny_gguf: TinyGguf) -> None:
    # Eight numbers a head do not fill a block of 32.
    options = LlamaCppOptions(n_ctx=256, type_v="q8_0", flash_attn=True)
    with pytest.raises(InvalidRequestError, match=r"type_v=q8_0.*V cache"):
        LlamaCppBackend(tiny_gguf("llama"), options)


@pytest.mark.parametrize("options", [{"n_ctx": 1}, {"n_batch": 1}, {"n_ctx": 300, "n_seq_max": 256}], ids=str)
def test_sizes_at_which_llama_cpp_would_end_the_process_are_rounded(
    options: dict[str, int], tiny_gguf: TinyGguf
) -> None:
    backend = LlamaCppBackend(tiny_gguf("llama"), LlamaCppOptions(**{"n_ctx": 256, "n_threads": 1} | options))
    assert backend.capabilities.kv_capacity_tokens in (256, 512)
    fill(backend, 20)
    backend.close()


def test_more_sequences_than_the_context_has_is_an_error_that_passes(backend: LlamaCppBackend) -> None:
    sequences = [fill(backend, 4) for _ in range(3)]
    with pytest.raises(KVCacheFullError, match=r"all 3 sequences .* in use.*n_seq_max"):
        backend.allocate()
    with pytest.raises(KVCacheFullError, match="all 3 sequences"):
        backend.fork(sequences[0])
    backend.free(sequences[1])
    fill(backend, 4)


def test_a_full_kv_cache_is_an_error_that_passes_and_changes_nothing(backend: LlamaCppBackend) -> None:
    # The tiny model was made for 128 tokens a sequence; the cache holds 256.
    first, second = fill(backend, 120), fill(backend, 120)
    third = backend.allocate()
    with pytest.raises(KVCacheFullError, match=r"no room for 20 more tokens in the KV cache of 256"):
        backend.forward([Chunk(first, [7]), Chunk(third, list(range(20, 39)))])
    assert [backend.length(s) for s in (first, second, third)] == [120, 120, 0]
    backend.free(second)
    rows = backend.forward([Chunk(first, [7]), Chunk(third, list(range(20, 39)))])
    assert all(np.isfinite(row).all() for row in rows)


def test_a_sequence_beyond_what_the_model_was_made_for_is_refused(backend: LlamaCppBackend) -> None:
    sequence = fill(backend, 120)
    with pytest.raises(ContextOverflowError, match=r"120 tokens \+ 9 more exceeds the context of 128"):
        backend.forward([Chunk(sequence, list(range(20, 29)))])
    assert backend.length(sequence) == 120


def test_a_call_that_fails_leaves_every_sequence_as_it_was(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(20, 40))
    whole = backend.allocate()
    expected = backend.forward([Chunk(whole, ids, (), "all")])[0]
    sequence = backend.allocate()
    backend.forward([Chunk(sequence, ids[:8])])
    decode = backend._batch.decode

    def fails_late(*arguments: object) -> int:
        # The work is done, and the tokens are in the cache, when the status says that it failed.
        decode(*arguments)  # type: ignore[arg-type]
        return -3

    monkeypatch.setattr(backend._batch, "decode", fails_late)
    with pytest.raises(GenerationError, match=r"llama\.cpp failed with status -3 on 12 tokens"):
        backend.forward([Chunk(sequence, ids[8:], (), "all")])
    monkeypatch.undo()
    assert backend.length(sequence) == 8
    found = backend.forward([Chunk(sequence, ids[8:], (), "all")])[0]
    assert np.allclose(found, expected[8:], atol=1e-4)


def test_requests_wait_for_room_in_the_cache_and_none_is_lost(tiny_gguf: TinyGguf) -> None:
    """Ten requests of 40 tokens and more, in a cache that holds 256 tokens and three sequences."""
    with OffsetRuntime(LlamaCppBackend(tiny_gguf("llama"), SMALL)) as runtime:
        sampling = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
        requests = [runtime.text_request(f"the news of day {i} " * 3, sampling=sampling) for i in range(10)]
        together = [stream.result().text for stream in [runtime.stream(request) for request in requests]]
        assert together == [runtime.run(request).text for request in requests]
        assert runtime.backend.state_bytes() == runtime.engine.cache_figures.bytes


def test_a_closed_backend_says_so_and_its_tokenizer_too(tiny_gguf: TinyGguf) -> None:
    backend = LlamaCppBackend(tiny_gguf("llama"), SMALL)
    sequence = fill(backend, 4)
    backend.close()
    backend.close()
    for act in (backend.allocate, lambda: backend.length(sequence), lambda: backend.tokenizer.encode("a")):
        with pytest.raises(InvalidRequestError, match="this backend is closed"):
            act()
    backend.free(sequence)


def test_a_tokenizer_in_use_by_other_threads_survives_the_close(tiny_gguf: TinyGguf) -> None:
    backend = LlamaCppBackend(tiny_gguf("llama"), SMALL)
    started, outcomes = threading.Barrier(5), []

    def tokenise() -> None:
        started.wait()
        try:
            while True:
                backend.tokenizer.encode("the law of the day " * 200)
        except InvalidRequestError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=tokenise) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    backend.close()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4


def test_its_log_goes_to_logging_and_not_to_the_terminal(
    tiny_gguf: TinyGguf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "offset_runtime.llama_cpp"):
        LlamaCppBackend(tiny_gguf("llama"), SMALL).close()
    assert any("n_ctx" in record.getMessage() for record in caplog.records)
    assert {record.name for record in caplog.records if record.name.startswith("offset_runtime")} == {
        "offset_runtime.llama_cpp"
    }
    assert capfd.readouterr() == ("", "")


def test_a_process_that_never_set_logging_up_sees_nothing_of_its_log(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(tiny_gguf("llama").read_bytes()[:-4000])
    code = (
        "import sys\n"
        "from offset_runtime.backends.llama_cpp import LlamaCppBackend\n"
        "from offset_runtime.errors import ModelNotFoundError\n"
        "LlamaCppBackend(sys.argv[1]).close()\n"
        "try:\n    LlamaCppBackend(sys.argv[2])\n"
        "except ModelNotFoundError: pass\n"
    )
    paths = [str(tiny_gguf("llama")), str(tmp_path / "bad.gguf")]
    ran = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert (ran.stdout, ran.stderr) == ("", "")
