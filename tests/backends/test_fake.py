"""The fake backend keeps the contract, and answers as its script says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offset_runtime import OffsetRuntime
from offset_runtime.backends import conformance
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend, FakeTokenizer


@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
def test_contract(behaviour: str) -> None:
    conformance.check(behaviour, FakeBackend)


def test_a_script_answers_by_the_prompts_text() -> None:
    with OffsetRuntime(FakeBackend(script=lambda prompt: "short" if "brief" in prompt else "a long answer")) as runtime:
        for words, reply in (("be brief", "short"), ("go on", "a long answer")):
            found = runtime.run(runtime.chat_request([{"role": "user", "content": words}]))
            assert (found.text, found.finish_reason) == (reply, "stop")


def test_where_the_script_has_nothing_to_say_the_text_is_random() -> None:
    with OffsetRuntime(FakeBackend(script=lambda prompt: None)) as runtime:
        assert runtime.run(runtime.text_request("hello")).usage.output_tokens > 0


def test_replies_are_the_same_in_every_process() -> None:
    code = (
        "from offset_runtime import OffsetRuntime\n"
        "with OffsetRuntime.load('fake') as runtime:\n"
        "    print(runtime.run(runtime.text_request('hello')).token_ids)\n"
    )
    shown = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout for _ in range(2)]
    assert shown[0] == shown[1] != b""


def test_special_tokens_written_out_are_recognised_and_left_out_of_the_text() -> None:
    tokenizer = FakeTokenizer()
    text = "<|im_start|>user\nça va?<|im_end|><|im_start|>"
    ids = tokenizer.encode(text)
    assert [token for token in ids if token >= 256] == [256, 257, 256]
    assert tokenizer.decode(ids) == "user\nça va?"


def test_open_sequences_are_counted() -> None:
    backend = FakeBackend()
    sequences = [backend.allocate() for _ in range(3)]
    backend.forward([Chunk(sequences[0], [1, 2])])
    assert backend.open_sequences == 3
    backend.free(sequences[0])
    assert backend.open_sequences == 2
    backend.close()
    assert (backend.open_sequences, backend.state_bytes()) == (0, 0)
