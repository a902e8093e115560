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

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend, Chunk, LogitsWanted, SequenceId
from offset_runtime.errors import InvalidRequestError
from offset_runtime.offset import Anchor, DomainOffset
from offset_runtime.placement import Placement, place

Logits = npt.NDArray[np.float32]

# Longest prompt of the suite. A test model with a sliding window should have a shorter one.
PROMPT_TOKENS = 20
REPLY_TOKENS = 6

# Float sums depend on the shape of a batch: a greedy token may differ where the two best logits lie this close.
NEAR_TIE = 1e-3


class ContractError(AssertionError):
    """The backend breaks its contract; the message names the behaviour."""


def check(behaviour: str, make_backend: Callable[[], Backend], *, tolerance: float = 2e-4) -> None:
    """Run one behaviour of `BEHAVIOURS` on the backend that `make_backend` returns, and free what it opened.

    `tolerance`: largest difference of two logits that counts as none, relative to the largest logit.
    Raises `ContractError` when the backend does not behave so.
    """
    bench = _Bench(behaviour, make_backend(), tolerance)
    try:
        capability = _CAPABILITY_OF.get(behaviour)
        if capability is None or getattr(bench.backend.capabilities, capability):
            _CHECKS[behaviour](bench)
        else:
            _undeclared_is_refused(bench, capability)
    finally:
        bench.close()


@dataclass(slots=True)
class _Bench:
    """A backend under test: what the behaviours have in common."""

    behaviour: str
    backend: Backend
    tolerance: float
    opened: list[SequenceId] = field(default_factory=list)

    def open(self) -> SequenceId:
        self.opened.append(self.backend.allocate())
        return self.opened[-1]

    def fork(self, sequence: SequenceId) -> SequenceId:
        self.opened.append(self.backend.fork(sequence))
        return self.opened[-1]

    def close(self) -> None:
        for sequence in self.opened:
            self.backend.free(sequence)

    def prompt(self, seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Random token ids, away from the special tokens at both ends of the vocabulary."""
        size = self.backend.identity.vocab_size
        return [int(i) for i in np.random.default_rng(seed).integers(int(size * 0.05), int(size * 0.9), tokens)]

    def offset(self, seed: int, positions: int = 3, anchor: Anchor = "turn") -> DomainOffset:
        """A random offset a few times as large as the embeddings it is added to."""
        identity = self.backend.identity
        sketch = np.frombuffer(base64.b64decode(identity.sketch), dtype="<f2").astype(np.float32)
        rows = np.random.default_rng(seed).normal(size=(positions, identity.hidden_size)) * 3 * sketch.std()
        return DomainOffset(f"d{seed}", rows.astype(np.float32), anchor, "raw", identity)

    def feed(
        self,
        sequence: SequenceId,
        ids: Sequence[int],
        placements: Sequence[Placement] = (),
        logits: LogitsWanted = "all",
    ) -> Logits:
        return self.backend.forward([Chunk(sequence, ids, placements, logits)])[0]

    def run(self, ids: Sequence[int], placements: Sequence[Placement] = (), cuts: Sequence[int] = ()) -> Logits:
        """Logits of all positions of `ids`, fed to a new sequence in chunks cut at `cuts`."""
        sequence = self.open()
        bounds = [0, *cuts, len(ids)]
        rows = [self.feed(sequence, ids[a:b], placements) for a, b in pairwise(bounds)]
        self.backend.free(sequence)
        return np.concatenate(rows)

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            raise ContractError(f"backend {self.backend.name!r} breaks {self.behaviour!r}: {message}")

    def expect_equal(self, found: Logits, expected: Logits, what: str) -> None:
        self.expect(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
        gap = float(np.abs(found - expected).max(initial=0.0))
        limit = self.tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
        self.expect(gap <= limit, f"{what}: logits differ by {gap:.3g} (allowed: {limit:.3g})")

    def expect_different(self, found: Logits, expected: Logits, what: str) -> None:
        gap = np.abs(found - expected).max(axis=-1)
        limit = 5 * self.tolerance * max(1.0, float(np.abs(expected).max()))
        self.expect(bool((gap > limit).all()), f"{what}: rows {np.flatnonzero(gap <= limit).tolist()} are unchanged")

    def expect_refused(self, act: Callable[[], object], what: str) -> None:
        try:
            act()
        except InvalidRequestError:
            return
        except Exception as error:
            self.expect(False, f"{what} raises {error!r}, expected InvalidRequestError")
        self.expect(False, f"{what} is accepted, expected InvalidRequestError")


def _zero_offset_changes_nothing(bench: _Bench) -> None:
    ids, zero = bench.prompt(1), bench.offset(1).scaled(0)
    plain, with_zero = bench.run(ids), bench.run(ids, [place(zero, len(ids))])
    bench.expect(bool((plain == with_zero).all()), "a zero offset changes logits, expected exactly the same")


def _offset_acts_from_its_first_position(bench: _Bench) -> None:
    ids, offset = bench.prompt(2), bench.offset(2)
    plain = bench.run(ids)
    for index in (0, 7, len(ids) - offset.positions):
        found = bench.run(ids, [Placement(index, offset, offset.positions)])
        bench.expect_equal(found[:index], plain[:index], f"positions before an offset at {index}")
        stop = index + offset.positions
        bench.expect_different(found[index:stop], plain[index:stop], f"positions of an offset at {index}")


def _anchors_place_the_rows(bench: _Bench) -> None:
    ids = bench.prompt(3)
    turn, sequence = bench.offset(3), bench.offset(3, anchor="sequence")
    plain, first = bench.run(ids), len(ids) - turn.positions
    at_turn = bench.run(ids, [place(turn, len(ids))])
    bench.expect_equal(at_turn[:first], plain[:first], "positions before a turn-anchored offset")
    bench.expect_different(at_turn[first:], plain[first:], "positions of a turn-anchored offset")
    at_start = bench.run(ids, [place(sequence, len(ids))])
    bench.expect_different(at_start[: sequence.positions], plain[: sequence.positions], "a sequence-anchored offset")
    # A prompt shorter than K: the rows left over are never added to the reply.
    short = place(sequence, 2)
    expected = bench.run(ids[:2], [Placement(0, _rows(sequence, 0, 2), 2)])
    bench.expect_equal(bench.run(ids[:2], [short]), expected, "a prompt shorter than a sequence-anchored offset")
    replied = bench.run(ids[:6], [short], cuts=(2, 3, 4, 5))
    expected = bench.run(ids[:6], [Placement(0, _rows(sequence, 0, 2), 2)])
    bench.expect_equal(replied, expected, "the reply after a prompt shorter than the offset")


def _offset_is_its_rows(bench: _Bench) -> None:
    ids, offset = bench.prompt(4), bench.offset(4)
    whole = bench.run(ids, [Placement(5, offset, 3)])
    apart = [Placement(5 + row, _rows(offset, row, row + 1), 1) for row in range(3)]
    bench.expect_equal(bench.run(ids, apart), whole, "three placements of one row against one of three")
    fewer = bench.run(ids, [Placement(5, offset, 2)])
    bench.expect_equal(bench.run(ids, apart[:2]), fewer, "a placement of the first two rows of three")
    bench.expect_different(fewer[7:8], whole[7:8], "the position of a row left out")


def _two_placements_in_one_prompt(bench: _Bench) -> None:
    ids = bench.prompt(5)
    early, late = Placement(2, bench.offset(5), 3), Placement(12, bench.offset(6), 3)
    both, only_early = bench.run(ids, [early, late]), bench.run(ids, [early])
    bench.expect_equal(both[:12], only_early[:12], "positions before the second placement")
    bench.expect_different(both[12:15], only_early[12:15], "positions of the second placement")
    bench.expect_different(both[12:15], bench.run(ids, [late])[12:15], "the first placement's part after the second")
    bench.expect_equal(bench.run(ids, [late, early]), both, "the same placements in another order")
    bench.expect_equal(bench.run(ids, [early, late], cuts=(8,)), both, "a chunk border between two placements")


def _chunks_equal_the_whole(bench: _Bench) -> None:
    ids = bench.prompt(7)
    placements = [Placement(4, bench.offset(7), 3), Placement(15, bench.offset(8, positions=5), 5)]
    whole = bench.run(ids, placements)
    for cuts in ((5,), (4, 7, 16), tuple(range(1, len(ids)))):
        found = bench.run(ids, placements, cuts=cuts)
        bench.expect_equal(found, whole, f"a prompt cut at {cuts} against the whole")


def _offset_is_not_added_at_decode(bench: _Bench) -> None:
    ids, reply = bench.prompt(9, 12), bench.prompt(10, REPLY_TOKENS)
    for anchor in ("turn", "sequence"):
        placement = place(bench.offset(9, anchor=anchor), len(ids))
        expected = bench.run([*ids, *reply], [placement])[len(ids) :]
        for repeated in ((), (placement,)):
            sequence = bench.open()
            bench.feed(sequence, ids, [placement], "none")
            found = np.concatenate([bench.feed(sequence, [token], repeated) for token in reply])
            what = "with" if repeated else "without"
            bench.expect_equal(found, expected, f"single steps, {what} the {anchor} placement named again")


def _mixed_batch_equals_each_alone(bench: _Bench) -> None:
    lengths = (13, 5, 9, 17, 1)
    prompts = [bench.prompt(20 + i, n) for i, n in enumerate(lengths)]
    placements: list[list[Placement]] = [[place(bench.offset(20 + i), n)] for i, n in enumerate(lengths[:4])]
    placements[1] = []
    placements[3] = [place(bench.offset(30, positions=4, anchor="sequence"), 17)]
    placements.append([place(bench.offset(31, positions=1), 1)])
    alone = [bench.run(ids, placed) for ids, placed in zip(prompts, placements, strict=True)]
    sequences = [bench.open() for _ in prompts]
    # The third is in decode, the fourth between two chunks, its border inside its offset, when the others begin.
    fed = [0, 0, 8, 2, 0]
    for i in (2, 3):
        bench.feed(sequences[i], prompts[i][: fed[i]], placements[i])
    order = (3, 0, 2, 4, 1)
    chunks = [Chunk(sequences[i], prompts[i][fed[i] :], placements[i], "all") for i in order]
    for i, found in zip(order, bench.backend.forward(chunks), strict=True):
        bench.expect_equal(found, alone[i][fed[i] :], f"row of {lengths[i]} tokens in a mixed batch")
    replies = [bench.prompt(40 + i, 2) for i in range(len(prompts))]
    steps = [bench.backend.forward([Chunk(s, [r[n]]) for s, r in zip(sequences, replies, strict=True)]) for n in (0, 1)]
    for i, rows in enumerate(zip(*steps, strict=True)):
        expected = bench.run([*prompts[i], *replies[i]], placements[i])[-2:]
        bench.expect_equal(np.concatenate(rows), expected, f"decode steps of row {i} in a mixed batch")


def _logits_come_as_asked(bench: _Bench) -> None:
    ids, placement = bench.prompt(11), Placement(3, bench.offset(11), 3)
    wanted: tuple[LogitsWanted, ...] = ("none", "last", "all")
    found = {kind: bench.feed(bench.open(), ids, [placement], kind) for kind in wanted}
    for kind, rows in zip(wanted, (0, 1, len(ids)), strict=True):
        shape, dtype = found[kind].shape, found[kind].dtype
        bench.expect(
            shape == (rows, found["all"].shape[1]), f"logits {kind!r} have shape {shape}, expected {rows} rows"
        )
        bench.expect(dtype == np.float32, f"logits {kind!r} are {dtype}, expected float32")
    bench.expect_equal(found["last"], found["all"][-1:], "'last' against the last row of 'all'")
    bench.expect(bench.backend.forward([]) == [], "a pass without chunks does not return an empty list")
    sequences = [bench.open() for _ in wanted]
    mixed = bench.backend.forward([Chunk(s, ids, [placement], kind) for s, kind in zip(sequences, wanted, strict=True)])
    for kind, rows_found in zip(wanted, mixed, strict=True):
        bench.expect_equal(rows_found, found[kind], f"logits {kind!r} in a batch of all three kinds")


def _greedy_cached_equals_full_prefill(bench: _Bench) -> None:
    ids = bench.prompt(12)
    for placements in ([], [place(bench.offset(12), len(ids))]):
        sequence, text = bench.open(), list(ids)
        row = bench.feed(sequence, ids, placements, "last")[0]
        for _ in range(REPLY_TOKENS):
            text.append(int(row.argmax()))
            row = bench.feed(sequence, text[-1:], (), "last")[0]
        reference = bench.run(text, placements)[len(ids) - 1 : -1]
        for step, (token, row) in enumerate(zip(text[len(ids) :], reference, strict=True)):
            best, second = np.sort(row)[[-1, -2]]
            same = token == int(row.argmax()) or best - second <= NEAR_TIE
            bench.expect(same, f"greedy token {step} is {token}, a full prefill gives {int(row.argmax())}")


def _free_forgets(bench: _Bench) -> None:
    ids, before = bench.prompt(13), bench.backend.state_bytes()
    expected = bench.run(ids)
    sequence = bench.open()
    bench.feed(sequence, bench.prompt(14), [Placement(3, bench.offset(13), 3)])
    bench.expect(bench.backend.state_bytes() > before, "a sequence of tokens takes no state")
    bench.backend.free(sequence)
    bench.expect(bench.backend.state_bytes() == before, "state is left behind by a freed sequence")
    bench.expect_refused(lambda: bench.feed(sequence, ids), "feeding a freed sequence")
    bench.backend.free(sequence)
    bench.expect_equal(bench.run(ids), expected, "a new sequence after another was freed")


def _length_counts_tokens(bench: _Bench) -> None:
    sequence, ids = bench.open(), bench.prompt(15)
    bench.expect(bench.backend.length(sequence) == 0, "a new sequence is not empty")
    for tokens, expected in ((7, 7), (1, 8), (12, 20)):
        bench.feed(sequence, ids[:tokens], (), "none")
        found = bench.backend.length(sequence)
        bench.expect(found == expected, f"length {found} after {expected} tokens")


def _failed_pass_changes_nothing(bench: _Bench) -> None:
    ids, placement = bench.prompt(16), Placement(8, bench.offset(16), 3)
    expected = bench.run(ids, [placement])
    size = bench.backend.identity.vocab_size
    gone = bench.backend.allocate()
    bench.backend.free(gone)
    for what, sequence, bad in (("no tokens", None, []), ("a foreign token", None, [size]), ("no sequence", gone, [1])):
        good, other = bench.open(), bench.open() if sequence is None else sequence
        bench.feed(good, ids[:9], [placement])
        chunks = [Chunk(good, ids[9:], [placement], "all"), Chunk(other, bad, (), "all")]
        bench.expect_refused(lambda chunks=chunks: bench.backend.forward(chunks), f"a batch with a chunk of {what}")  # type: ignore[misc]
        bench.expect(bench.backend.length(good) == 9, f"a failed batch ({what}) moved the sequence beside it")
        found = bench.feed(good, ids[9:], [placement])
        bench.expect_equal(found, expected[9:], f"the sequence beside a chunk of {what}, fed again")
        if sequence is None:
            bench.expect_equal(bench.feed(other, ids, [placement]), expected, f"the sequence given {what}, fed again")
    twice = bench.open()
    chunks = [Chunk(twice, ids), Chunk(twice, ids)]
    bench.expect_refused(lambda: bench.backend.forward(chunks), "two chunks of one sequence in a pass")


def _tokenizer_adds_nothing(bench: _Bench) -> None:
    tokenizer = bench.backend.tokenizer
    bench.expect(tokenizer.encode("") == [], "the tokenizer adds tokens to an empty text")
    found = tokenizer.encode("a plain text")
    special = {tokenizer.bos_token_id, *tokenizer.eos_token_ids} & set(found)
    bench.expect(not special, f"the tokenizer adds special tokens {special} to a text")
    bench.expect(tokenizer.decode(found).strip() == "a plain text", "encoding and decoding does not give the text back")


def _fork_is_independent(bench: _Bench) -> None:
    ids, placement = bench.prompt(17), Placement(9, bench.offset(17), 3)
    other_ids, other = bench.prompt(18), Placement(12, bench.offset(18), 2)
    # Cut inside the placement: the rows already added are not added again, the others still are.
    parent = bench.open()
    bench.feed(parent, ids[:10], [placement])
    child = bench.fork(parent)
    bench.expect(bench.backend.length(child) == 10, "a fork has another length than its parent")
    branch = [*ids[:10], *other_ids[10:]]
    found = bench.feed(child, branch[10:], [placement, other])
    bench.expect_equal(found, bench.run(branch, [placement, other])[10:], "a fork's own continuation")
    found = bench.feed(parent, ids[10:], [placement])
    bench.expect_equal(found, bench.run(ids, [placement])[10:], "the parent's continuation after its fork's")
    grandchild = bench.fork(child)
    bench.backend.free(parent)
    bench.backend.free(child)
    found = bench.feed(grandchild, ids[:1])
    expected = bench.run([*branch, ids[0]], [placement, other])[-1:]
    bench.expect_equal(found, expected, "a fork whose parents were freed")


def _forks_decode_in_one_batch(bench: _Bench) -> None:
    ids, placement = bench.prompt(19, 9), Placement(6, bench.offset(19), 3)
    parent = bench.open()
    bench.feed(parent, ids, [placement])
    sequences, replies = [parent, bench.fork(parent), bench.fork(parent)], [bench.prompt(50 + i, 3) for i in range(3)]
    steps = [
        bench.backend.forward([Chunk(s, [r[step]]) for s, r in zip(sequences, replies, strict=True)])
        for step in range(3)
    ]
    for reply, rows in zip(replies, zip(*steps, strict=True), strict=True):
        expected = bench.run([*ids, *reply], [placement])[len(ids) :]
        bench.expect_equal(np.concatenate(rows), expected, "decode steps of forks in one batch")


def _truncate_then_continue_equals_cold(bench: _Bench) -> None:
    ids, other_ids = bench.prompt(60), bench.prompt(61)
    placement, other = Placement(9, bench.offset(60), 3), Placement(9, bench.offset(61), 3)
    sequence = bench.open()
    expected = bench.feed(sequence, ids, [placement])
    # Back to behind, into and before the placement; then to nothing.
    for tokens in (15, 10, 5, 0):
        bench.backend.truncate(sequence, tokens)
        bench.expect(bench.backend.length(sequence) == tokens, f"length after cutting back to {tokens} tokens")
        found = bench.feed(sequence, ids[tokens:], [placement])
        bench.expect_equal(found, expected[tokens:], f"the same text after a cut to {tokens}")
    bench.backend.truncate(sequence, 5)
    branch = [*ids[:5], *other_ids[5:]]
    found = bench.feed(sequence, branch[5:], [other])
    bench.expect_equal(found, bench.run(branch, [other])[5:], "another text and offset after a cut")
    bench.backend.truncate(sequence, 9)
    found = bench.feed(sequence, ids[9:])
    bench.expect_equal(found, bench.run([*branch[:9], *ids[9:]])[9:], "no offset after a cut to before one")
    if bench.backend.capabilities.fork:
        fork = bench.fork(sequence)
        bench.backend.truncate(sequence, 2)
        bench.feed(sequence, other_ids)
        expected = bench.run([*branch[:9], *ids[9:], ids[0]])[-1:]
        bench.expect_equal(bench.feed(fork, ids[:1]), expected, "a fork whose parent was cut back and fed again")
    for tokens in (-1, 1000):
        bench.expect_refused(lambda t=tokens: bench.backend.truncate(sequence, t), f"a cut to {tokens} tokens")  # type: ignore[misc]


def _undeclared_is_refused(bench: _Bench, capability: str) -> None:
    sequence, ids = bench.open(), bench.prompt(70, 6)
    bench.feed(sequence, ids[:5], (), "none")
    operations: dict[str, Callable[[], object]] = {
        "fork": lambda: bench.backend.fork(sequence),
        "truncate": lambda: bench.backend.truncate(sequence, 2),
    }
    bench.expect_refused(operations[capability], f"{capability}, which the backend does not declare,")
    found = bench.feed(sequence, ids[5:])
    bench.expect_equal(found, bench.run(ids)[5:], f"the sequence after {capability} was refused")


def _rows(offset: DomainOffset, first: int, stop: int) -> DomainOffset:
    return DomainOffset(offset.domain, offset.tensor[first:stop], offset.anchor, offset.prompt_format, offset.base)


_REQUIRED_CHECKS: dict[str, Callable[[_Bench], None]] = {
    "zero offset changes nothing": _zero_offset_changes_nothing,
    "offset acts from its first position": _offset_acts_from_its_first_position,
    "anchors place the rows": _anchors_place_the_rows,
    "offset is its rows": _offset_is_its_rows,
    "two placements in one prompt": _two_placements_in_one_prompt,
    "chunks equal the whole": _chunks_equal_the_whole,
    "offset is not added at decode": _offset_is_not_added_at_decode,
    "mixed batch equals each alone": _mixed_batch_equals_each_alone,
    "logits come as asked": _logits_come_as_asked,
    "greedy cached equals full prefill": _greedy_cached_equals_full_prefill,
    "free forgets": _free_forgets,
    "length counts tokens": _length_counts_tokens,
    "failed pass changes nothing": _failed_pass_changes_nothing,
    "tokenizer adds nothing": _tokenizer_adds_nothing,
}
_CAPABILITY_CHECKS: dict[str, tuple[str, Callable[[_Bench], None]]] = {
    "fork is independent": ("fork", _fork_is_independent),
    "forks decode in one batch": ("fork", _forks_decode_in_one_batch),
    "truncate then continue equals cold": ("truncate", _truncate_then_continue_equals_cold),
}
_CHECKS = _REQUIRED_CHECKS | {name: run for name, (_, run) in _CAPABILITY_CHECKS.items()}
_CAPABILITY_OF = {name: capability for name, (capability, _) in _CAPABILITY_CHECKS.items()}

REQUIRED: frozenset[str] = frozenset(_REQUIRED_CHECKS)
BY_CAPABILITY: frozenset[str] = frozenset(_CAPABILITY_CHECKS)
BEHAVIOURS: tuple[str, ...] = tuple(sorted(REQUIRED | BY_CAPABILITY))
