"""The contract of a backend, as a suite that runs on any of them.

For a backend of your own, in a pytest file (`make_backend` returns it; it may return the same one each time):

    @pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
    def test_contract(behaviour: str) -> None:
        conformance.check(behaviour, make_backend)

Every backend must show the behaviours in `REQUIRED`. Those in `BY_CAPABILITY` belong to an operation that
`Capabilities` declares: where it is declared they must hold, where it is not the operation must raise
`InvalidRequestError`. Nothing is ever skipped. A breach raises `ContractError`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offset_runtime.backends import conformance_copies as copies
from offset_runtime.backends.base import Backend, Chunk, LogitsWanted
from offset_runtime.backends.trial import ContractError, Trial
from offset_runtime.offset import DomainOffset
from offset_runtime.placement import Placement, place

__all__ = ["BEHAVIOURS", "BY_CAPABILITY", "NEAR_TIE", "REQUIRED", "ContractError", "check"]

REPLY_TOKENS = 6

# Float sums depend on the shape of a batch: a greedy token may differ where the two best logits lie this close.
NEAR_TIE = 1e-3


def check(
    behaviour: str, make_backend: Callable[[], Backend], *, tolerance: float = 2e-4, offset_size: float = 3.0
) -> None:
    """Run one behaviour of `BEHAVIOURS` on the backend that `make_backend` returns, and free what it opened.

    `tolerance`: largest difference of two logits that counts as none, relative to the largest logit.
    `offset_size`: standard deviation of the offsets it tries, in that of the embedding table; models that scale
    their embeddings need as much more. Raises `ContractError` when the backend does not behave so.
    """
    trial = Trial(behaviour, make_backend(), tolerance, offset_size)
    try:
        capability = _CAPABILITY_OF.get(behaviour)
        if capability is None or getattr(trial.backend.capabilities, capability):
            _CHECKS[behaviour](trial)
        else:
            _undeclared_is_refused(trial, capability)
    finally:
        trial.close()


def _zero_offset_changes_nothing(trial: Trial) -> None:
    ids, zero = trial.prompt(1), trial.offset(1).scaled(0)
    plain, with_zero = trial.run(ids), trial.run(ids, [place(zero, len(ids))])
    trial.expect(bool((plain == with_zero).all()), "a zero offset changes logits, expected exactly the same")


def _offset_acts_from_its_first_position(trial: Trial) -> None:
    ids, offset = trial.prompt(2), trial.offset(2)
    plain = trial.run(ids)
    for index in (0, 7, len(ids) - offset.positions):
        found = trial.run(ids, [Placement(index, offset, offset.positions)])
        trial.expect_equal(found[:index], plain[:index], f"positions before an offset at {index}")
        stop = index + offset.positions
        trial.expect_different(found[index:stop], plain[index:stop], f"positions of an offset at {index}")


def _anchors_place_the_rows(trial: Trial) -> None:
    ids = trial.prompt(3)
    turn, sequence = trial.offset(3), trial.offset(3, anchor="sequence")
    plain, first = trial.run(ids), len(ids) - turn.positions
    at_turn = trial.run(ids, [place(turn, len(ids))])
    trial.expect_equal(at_turn[:first], plain[:first], "positions before a turn-anchored offset")
    trial.expect_different(at_turn[first:], plain[first:], "positions of a turn-anchored offset")
    at_start = trial.run(ids, [place(sequence, len(ids))])
    trial.expect_different(at_start[: sequence.positions], plain[: sequence.positions], "a sequence-anchored offset")
    # A prompt shorter than K: the rows left over are never added to the reply.
    short = place(sequence, 2)
    expected = trial.run(ids[:2], [Placement(0, _rows(sequence, 0, 2), 2)])
    trial.expect_equal(trial.run(ids[:2], [short]), expected, "a prompt shorter than a sequence-anchored offset")
    replied = trial.run(ids[:6], [short], cuts=(2, 3, 4, 5))
    expected = trial.run(ids[:6], [Placement(0, _rows(sequence, 0, 2), 2)])
    trial.expect_equal(replied, expected, "the reply after a prompt shorter than the offset")


def _offset_is_its_rows(trial: Trial) -> None:
    ids, offset = trial.prompt(4), trial.offset(4)
    whole = trial.run(ids, [Placement(5, offset, 3)])
    apart = [Placement(5 + row, _rows(offset, row, row + 1), 1) for row in range(3)]
    trial.expect_equal(trial.run(ids, apart), whole, "three placements of one row against one of three")
    fewer = trial.run(ids, [Placement(5, offset, 2)])
    trial.expect_equal(trial.run(ids, apart[:2]), fewer, "a placement of the first two rows of three")
    trial.expect_different(fewer[7:8], whole[7:8], "the position of a row left out")


def _two_placements_in_one_prompt(trial: Trial) -> None:
    ids = trial.prompt(5)
    early, late = Placement(2, trial.offset(5), 3), Placement(12, trial.offset(6), 3)
    both, only_early = trial.run(ids, [early, late]), trial.run(ids, [early])
    trial.expect_equal(both[:12], only_early[:12], "positions before the second placement")
    trial.expect_different(both[12:15], only_early[12:15], "positions of the second placement")
    trial.expect_different(both[12:15], trial.run(ids, [late])[12:15], "the first placement's part after the second")
    trial.expect_equal(trial.run(ids, [late, early]), both, "the same placements in another order")
    trial.expect_equal(trial.run(ids, [early, late], cuts=(8,)), both, "a chunk border between two placements")


def _chunks_equal_the_whole(trial: Trial) -> None:
    ids = trial.prompt(7)
    placements = [Placement(4, trial.offset(7), 3), Placement(15, trial.offset(8, positions=5), 5)]
    whole = trial.run(ids, placements)
    for cuts in ((5,), (4, 7, 16), tuple(range(1, len(ids)))):
        found = trial.run(ids, placements, cuts=cuts)
        trial.expect_equal(found, whole, f"a prompt cut at {cuts} against the whole")


def _offset_is_not_added_at_decode(trial: Trial) -> None:
    ids, reply = trial.prompt(9, 12), trial.prompt(10, REPLY_TOKENS)
    for anchor in ("turn", "sequence"):
        placement = place(trial.offset(9, anchor=anchor), len(ids))
        expected = trial.run([*ids, *reply], [placement])[len(ids) :]
        for repeated in ((), (placement,)):
            sequence = trial.open()
            trial.feed(sequence, ids, [placement], "none")
            found = np.concatenate([trial.feed(sequence, [token], repeated) for token in reply])
            what = "with" if repeated else "without"
            trial.expect_equal(found, expected, f"single steps, {what} the {anchor} placement named again")


def _mixed_batch_equals_each_alone(trial: Trial) -> None:
    lengths = (13, 5, 9, 17, 1)
    prompts = [trial.prompt(20 + i, n) for i, n in enumerate(lengths)]
    placements: list[list[Placement]] = [[place(trial.offset(20 + i), n)] for i, n in enumerate(lengths[:4])]
    placements[1] = []
    placements[3] = [place(trial.offset(30, positions=4, anchor="sequence"), 17)]
    placements.append([place(trial.offset(31, positions=1), 1)])
    alone = [trial.run(ids, placed) for ids, placed in zip(prompts, placements, strict=True)]
    sequences = [trial.open() for _ in prompts]
    # The third is in decode, the fourth between two chunks, its border inside its offset, when the others begin.
    fed = [0, 0, 8, 2, 0]
    for i in (2, 3):
        trial.feed(sequences[i], prompts[i][: fed[i]], placements[i])
    order = (3, 0, 2, 4, 1)
    chunks = [Chunk(sequences[i], prompts[i][fed[i] :], placements[i], "all") for i in order]
    for i, found in zip(order, trial.backend.forward(chunks), strict=True):
        trial.expect_equal(found, alone[i][fed[i] :], f"row of {lengths[i]} tokens in a mixed batch")
    replies = [trial.prompt(40 + i, 2) for i in range(len(prompts))]
    steps = [trial.backend.forward([Chunk(s, [r[n]]) for s, r in zip(sequences, replies, strict=True)]) for n in (0, 1)]
    for i, rows in enumerate(zip(*steps, strict=True)):
        expected = trial.run([*prompts[i], *replies[i]], placements[i])[-2:]
        trial.expect_equal(np.concatenate(rows), expected, f"decode steps of row {i} in a mixed batch")


def _logits_come_as_asked(trial: Trial) -> None:
    ids, placement = trial.prompt(11), Placement(3, trial.offset(11), 3)
    wanted: tuple[LogitsWanted, ...] = ("none", "last", "all")
    found = {kind: trial.feed(trial.open(), ids, [placement], kind) for kind in wanted}
    for kind, rows in zip(wanted, (0, 1, len(ids)), strict=True):
        shape, expected, dtype = found[kind].shape, (rows, found["all"].shape[1]), found[kind].dtype
        trial.expect(shape == expected, f"logits {kind!r} have shape {shape}, expected {expected}")
        trial.expect(dtype == np.float32, f"logits {kind!r} are {dtype}, expected float32")
    trial.expect_equal(found["last"], found["all"][-1:], "'last' against the last row of 'all'")
    trial.expect(trial.backend.forward([]) == [], "a pass without chunks does not return an empty list")
    sequences = [trial.open() for _ in wanted]
    mixed = trial.backend.forward([Chunk(s, ids, [placement], kind) for s, kind in zip(sequences, wanted, strict=True)])
    for kind, rows_found in zip(wanted, mixed, strict=True):
        trial.expect_equal(rows_found, found[kind], f"logits {kind!r} in a batch of all three kinds")


def _greedy_cached_equals_full_prefill(trial: Trial) -> None:
    ids = trial.prompt(12)
    for placements in ([], [place(trial.offset(12), len(ids))]):
        sequence, text = trial.open(), list(ids)
        row = trial.feed(sequence, ids, placements, "last")[0]
        for _ in range(REPLY_TOKENS):
            text.append(int(row.argmax()))
            row = trial.feed(sequence, text[-1:], (), "last")[0]
        reference = trial.run(text, placements)[len(ids) - 1 : -1]
        for step, (token, row) in enumerate(zip(text[len(ids) :], reference, strict=True)):
            best, second = np.sort(row)[[-1, -2]]
            same = token == int(row.argmax()) or best - second <= NEAR_TIE
            trial.expect(same, f"greedy token {step} is {token}, a full prefill gives {int(row.argmax())}")


def _free_forgets(trial: Trial) -> None:
    ids, before = trial.prompt(13), trial.backend.state_bytes()
    expected = trial.run(ids)
    sequence = trial.open()
    trial.feed(sequence, trial.prompt(14), [Placement(3, trial.offset(13), 3)])
    trial.expect(trial.backend.state_bytes() > before, "a sequence of tokens takes no state")
    added = trial.backend.state_bytes() - before
    trial.expect(trial.backend.sequence_bytes(sequence) == added, "a sequence's bytes are not what it adds to all")
    trial.backend.free(sequence)
    trial.expect(trial.backend.state_bytes() == before, "state is left behind by a freed sequence")
    trial.expect_refused("feeding a freed sequence", trial.feed, sequence, ids)
    trial.expect_refused("the bytes of a freed sequence", trial.backend.sequence_bytes, sequence)
    trial.backend.free(sequence)
    trial.expect_equal(trial.run(ids), expected, "a new sequence after another was freed")


def _length_counts_tokens(trial: Trial) -> None:
    sequence, ids = trial.open(), trial.prompt(15)
    trial.expect(trial.backend.length(sequence) == 0, "a new sequence is not empty")
    for tokens, expected in ((7, 7), (1, 8), (12, 20)):
        trial.feed(sequence, ids[:tokens], (), "none")
        found = trial.backend.length(sequence)
        trial.expect(found == expected, f"length {found} after {expected} tokens")


def _failed_pass_changes_nothing(trial: Trial) -> None:
    ids, placement = trial.prompt(16), Placement(8, trial.offset(16), 3)
    expected = trial.run(ids, [placement])
    size = trial.backend.identity.vocab_size
    gone = trial.backend.allocate()
    trial.backend.free(gone)
    for what, sequence, bad in (("no tokens", None, []), ("a foreign token", None, [size]), ("no sequence", gone, [1])):
        good, other = trial.open(), trial.open() if sequence is None else sequence
        trial.feed(good, ids[:9], [placement])
        chunks = [Chunk(good, ids[9:], [placement], "all"), Chunk(other, bad, (), "all")]
        trial.expect_refused(f"a batch with a chunk of {what}", trial.backend.forward, chunks)
        trial.expect(trial.backend.length(good) == 9, f"a failed batch ({what}) moved the sequence beside it")
        found = trial.feed(good, ids[9:], [placement])
        trial.expect_equal(found, expected[9:], f"the sequence beside a chunk of {what}, fed again")
        if sequence is None:
            trial.expect_equal(trial.feed(other, ids, [placement]), expected, f"the sequence given {what}, fed again")
    twice = Chunk(trial.open(), ids)
    trial.expect_refused("two chunks of one sequence in a pass", trial.backend.forward, [twice, twice])


def _tokenizer_adds_nothing(trial: Trial) -> None:
    tokenizer = trial.backend.tokenizer
    trial.expect(tokenizer.encode("") == [], "the tokenizer adds tokens to an empty text")
    found = tokenizer.encode("a plain text")
    special = {tokenizer.bos_token_id, *tokenizer.eos_token_ids} & set(found)
    trial.expect(not special, f"the tokenizer adds special tokens {special} to a text")
    trial.expect(tokenizer.decode(found).strip() == "a plain text", "encoding and decoding does not give the text back")


def _undeclared_is_refused(trial: Trial, capability: str) -> None:
    sequence, ids = trial.open(), trial.prompt(70, 6)
    trial.feed(sequence, ids[:5], (), "none")
    what = f"{capability}, which the backend does not declare,"
    if capability == "save_state":
        trial.expect_refused(what, trial.backend.state_key)
        trial.expect_refused(what, trial.backend.export_state, sequence)
        trial.expect_refused(what, trial.backend.import_state, {})
    elif capability == "fork":
        trial.expect_refused(what, trial.backend.fork, sequence)
    else:
        trial.expect_refused(what, trial.backend.truncate, sequence, 2)
    trial.expect_equal(
        trial.feed(sequence, ids[5:]), trial.run(ids)[5:], f"the sequence after {capability} was refused"
    )


def _rows(offset: DomainOffset, first: int, stop: int) -> DomainOffset:
    return DomainOffset(offset.domain, offset.tensor[first:stop], offset.anchor, offset.prompt_format, offset.base)


def _named(*checks: Callable[[Trial], None]) -> dict[str, Callable[[Trial], None]]:
    return {check.__name__.strip("_").replace("_", " "): check for check in checks}


_ALWAYS = _named(
    _zero_offset_changes_nothing,
    _offset_acts_from_its_first_position,
    _anchors_place_the_rows,
    _offset_is_its_rows,
    _two_placements_in_one_prompt,
    _chunks_equal_the_whole,
    _offset_is_not_added_at_decode,
    _mixed_batch_equals_each_alone,
    _logits_come_as_asked,
    _greedy_cached_equals_full_prefill,
    _free_forgets,
    _length_counts_tokens,
    _failed_pass_changes_nothing,
    _tokenizer_adds_nothing,
)
_FORK = _named(copies.fork_is_independent, copies.fork_of_a_beginning_equals_cold, copies.forks_decode_in_one_batch)
_TRUNCATE = _named(copies.truncate_then_continue_equals_cold)
_SAVE_STATE = _named(
    copies.restored_sequence_continues_as_the_original,
    copies.restored_sequence_is_like_any_other,
    copies.foreign_state_is_refused,
)
_CHECKS = _ALWAYS | _FORK | _TRUNCATE | _SAVE_STATE
_CAPABILITY_OF = (
    dict.fromkeys(_FORK, "fork") | dict.fromkeys(_TRUNCATE, "truncate") | dict.fromkeys(_SAVE_STATE, "save_state")
)

REQUIRED: frozenset[str] = frozenset(_ALWAYS)
BY_CAPABILITY: frozenset[str] = frozenset(_CAPABILITY_OF)
BEHAVIOURS: tuple[str, ...] = tuple(sorted(_CHECKS))
