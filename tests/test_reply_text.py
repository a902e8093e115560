"""Text deltas hold whole characters, no part of a stop string, and together the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from offset_runtime.backends.base import Backend
from offset_runtime.backends.base import Tokenizer as AnyTokenizer
from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.backends.torch_tokenizer import TorchTokenizer
from offset_runtime.reply_text import ReplyText

REPLACEMENT = "\ufffd"


def deltas(tokenizer: AnyTokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    reply = ReplyText(tokenizer, stop)
    found = []
    for token in ids:
        found.append(reply.push(token))
        if reply.stopped:
            return found
    return [*found, reply.finish()]


def cut_at_first_stop(text: str, stop: Sequence[str]) -> str:
    """What is left of `text`, read character by character, when generation ends at the first complete stop string."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.fixture(scope="module")
def sentencepiece_tokenizer() -> TorchTokenizer:
    """As Llama 2 and Gemma have it: words begin with U+2581, unknown characters fall back to byte tokens."""
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    for piece in ("▁", "▁a", "▁law", "a", "l", "w", "aw", "law", "▁the", "e", "t", "h"):
        vocab[piece] = len(vocab)
    merges = [("a", "w"), ("l", "aw"), ("▁", "a"), ("▁", "law")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0x00>")
    return TorchTokenizer(wrapped, ())


@given(st.lists(st.integers(0, 257), max_size=40))
def test_deltas_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    tokenizer = FakeTokenizer()
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(max_size=12))
def test_no_delta_holds_a_part_of_a_character(text: str) -> None:
    tokenizer = FakeTokenizer()
    for delta in deltas(tokenizer, list(text.encode())):
        assert delta == "" or set(delta) <= set(text)


class PieceTokenizer(FakeTokenizer):
    """Tokens are the given bytes, which may begin and end inside a character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode("utf-8", errors="replace")


@given(st.lists(st.lists(st.sampled_from("aé€😀".encode()), min_size=1, max_size=4).map(bytes), max_size=12))
def test_tokens_of_several_bytes_join_to_their_text(pieces: list[bytes]) -> None:
    tokenizer = PieceTokenizer(pieces)
    assert "".join(deltas(tokenizer, range(len(pieces)))) == tokenizer.decode(range(len(pieces)))


def test_a_character_completed_beside_the_beginning_of_another_is_not_shown_broken() -> None:
    pieces = [b"\xf0\x9f", b"\x98\x80\xe2", b"\xff", b"\xff", b"!"]
    assert "".join(deltas(PieceTokenizer(pieces), range(5))) == f"😀{REPLACEMENT * 3}!"


def test_each_character_comes_with_its_last_byte() -> None:
    assert deltas(FakeTokenizer(), list("aé€😀b".encode())) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    found = deltas(FakeTokenizer(), [0xFF] * 10 + [0xE2, 0x82, 0xAC])
    assert "".join(found[:10]) == REPLACEMENT * 7
    assert "".join(found) == REPLACEMENT * 10 + "€"


@given(st.text(alphabet="law the é€😀日", max_size=16))
def test_byte_fallback_and_leading_spaces_come_out_right(sentencepiece_tokenizer: TorchTokenizer, text: str) -> None:
    ids = sentencepiece_tokenizer.encode(text)
    found = deltas(sentencepiece_tokenizer, ids)
    assert "".join(found) == sentencepiece_tokenizer.decode(ids)
    assert REPLACEMENT not in "".join(found)


def test_a_token_without_text_does_not_swallow_the_space_after_it(sentencepiece_tokenizer: TorchTokenizer) -> None:
    tokenizer = sentencepiece_tokenizer
    law = tokenizer.encode("law")
    silent = tokenizer.encode("\0")[-1]
    assert tokenizer.decode([silent]) == ""
    assert "".join(deltas(tokenizer, [*law, silent, *law])) == "law law"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one. two. three", ["."], "one"),
        ("stop at the very end###", ["###"], "stop at the very end"),
        ("###", ["###"], ""),
        ("half a stop ##", ["###"], "half a stop ##"),
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("xab", ["ab", "b"], "x"),
        ("xabc", ["abc", "b"], "xa"),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("the €nd", ["€n"], "the "),
        ("naïve 😀 text", ["😀"], "naïve "),
        ("no stop here", ["zzz"], "no stop here"),
    ],
)
def test_text_ends_at_the_first_stop_string(text: str, stop: list[str], expected: str) -> None:
    assert "".join(deltas(FakeTokenizer(), list(text.encode()), stop)) == expected
    assert cut_at_first_stop(text, stop) == expected
    for width in (2, 3, 99):
        pieces = [text[i : i + width].encode() for i in range(0, len(text), width)]
        assert "".join(deltas(PieceTokenizer(pieces), range(len(pieces)), stop)) == expected


@given(
    st.text(alphabet="ab€", max_size=12),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_cut_as_reading_character_by_character_does(text: str, stop: list[str]) -> None:
    assert "".join(deltas(FakeTokenizer(), list(text.encode()), stop)) == cut_at_first_stop(text, stop)


@given(
    st.text(alphabet="abc", max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_where_tokens_begin_does_not_matter(text: str, stop: list[str]) -> None:
    pairs = [text[i : i + 2].encode() for i in range(0, len(text), 2)]
    assert "".join(deltas(PieceTokenizer(pairs), range(len(pairs)), stop)) == cut_at_first_stop(text, stop)


@given(st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", min_size=1, max_size=4))
def test_what_may_become_a_stop_string_is_held_back(text: str, stop: str) -> None:
    reply, out = ReplyText(FakeTokenizer(), [stop]), ""
    for byte in text.encode():
        out += reply.push(byte)
        # Nothing that was let go can be the beginning of the stop string.
        assert not any(
            out.endswith(stop[:n]) and text[len(out) :].startswith(stop[n:]) for n in range(1, len(stop) + 1)
        )


@pytest.mark.real_model
def test_random_tokens_of_the_real_tokenizer_join_to_their_text(smollm: Backend) -> None:
    tokenizer = smollm.tokenizer

    @given(st.lists(st.integers(0, smollm.identity.vocab_size - 1), max_size=20))
    def check(ids: list[int]) -> None:
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)

    check()
