"""The part of the contract on sequences that are forked, cut back, saved and restored; see `conformance`."""

from __future__ import annotations

import numpy as np

from offset_runtime.backends.base import Chunk
from offset_runtime.backends.trial import Trial
from offset_runtime.placement import Placement


def fork_is_independent(trial: Trial) -> None:
    ids, placement = trial.prompt(17), Placement(9, trial.offset(17), 3)
    other_ids, other = trial.prompt(18), Placement(12, trial.offset(18), 2)
    # Cut inside the placement: the rows already added are not added again, the others still are.
    parent = trial.open()
    trial.feed(parent, ids[:10], [placement])
    child = trial.fork(parent)
    trial.expect(trial.backend.length(child) == 10, "a fork has another length than its parent")
    branch = [*ids[:10], *other_ids[10:]]
    found = trial.feed(child, branch[10:], [placement, other])
    trial.expect_equal(found, trial.run(branch, [placement, other])[10:], "a fork's own continuation")
    found = trial.feed(parent, ids[10:], [placement])
    trial.expect_equal(found, trial.run(ids, [placement])[10:], "the parent's continuation after its fork's")
    grandchild = trial.fork(child)
    trial.backend.free(parent)
    trial.backend.free(child)
    found = trial.feed(grandchild, ids[:1])
    expected = trial.run([*branch, ids[0]], [placement, other])[-1:]
    trial.expect_equal(found, expected, "a fork whose parents were freed")


def fork_of_a_beginning_equals_cold(trial: Trial) -> None:
    ids, other_ids, placement = trial.prompt(62), trial.prompt(63), Placement(9, trial.offset(62), 3)
    parent, cuts = trial.open(), trial.backend.capabilities.truncate
    trial.feed(parent, ids[:16], [placement])
    # Nothing, before, inside and behind the placement.
    for tokens in (0, 5, 10, 16) if cuts else (16,):
        child, branch = trial.fork(parent, tokens), [*ids[:tokens], *other_ids[tokens:]]
        trial.expect(trial.backend.length(child) == tokens, f"length of a fork of {tokens} tokens")
        found = trial.feed(child, branch[tokens:], [placement])
        trial.expect_equal(found, trial.run(branch, [placement])[tokens:], f"the rest after a fork of {tokens} tokens")
    found = trial.feed(parent, ids[16:])
    trial.expect_equal(found, trial.run(ids, [placement])[16:], "the parent's continuation after forks of it")
    for tokens in (-1, 1000) if cuts else (-1, 5, 1000):
        trial.expect_refused(f"a fork of {tokens} tokens", trial.backend.fork, parent, tokens)


def forks_decode_in_one_batch(trial: Trial) -> None:
    ids, placement = trial.prompt(19, 9), Placement(6, trial.offset(19), 3)
    parent = trial.open()
    trial.feed(parent, ids, [placement])
    sequences, replies = [parent, trial.fork(parent), trial.fork(parent)], [trial.prompt(50 + i, 3) for i in range(3)]
    steps = [
        trial.backend.forward([Chunk(s, [r[step]]) for s, r in zip(sequences, replies, strict=True)])
        for step in range(3)
    ]
    for reply, rows in zip(replies, zip(*steps, strict=True), strict=True):
        expected = trial.run([*ids, *reply], [placement])[len(ids) :]
        trial.expect_equal(np.concatenate(rows), expected, "decode steps of forks in one batch")


def truncate_then_continue_equals_cold(trial: Trial) -> None:
    ids, other_ids = trial.prompt(60), trial.prompt(61)
    placement, other = Placement(9, trial.offset(60), 3), Placement(9, trial.offset(61), 3)
    sequence = trial.open()
    expected = trial.feed(sequence, ids, [placement])
    # Back to behind, into and before the placement; then to nothing.
    for tokens in (15, 10, 5, 0):
        trial.backend.truncate(sequence, tokens)
        trial.expect(trial.backend.length(sequence) == tokens, f"length after cutting back to {tokens} tokens")
        found = trial.feed(sequence, ids[tokens:], [placement])
        trial.expect_equal(found, expected[tokens:], f"the same text after a cut to {tokens}")
    trial.backend.truncate(sequence, 5)
    branch = [*ids[:5], *other_ids[5:]]
    found = trial.feed(sequence, branch[5:], [other])
    trial.expect_equal(found, trial.run(branch, [other])[5:], "another text and offset after a cut")
    trial.backend.truncate(sequence, 9)
    found = trial.feed(sequence, ids[9:])
    trial.expect_equal(found, trial.run([*branch[:9], *ids[9:]])[9:], "no offset after a cut to before one")
    if trial.backend.capabilities.fork:
        fork = trial.fork(sequence)
        trial.backend.truncate(sequence, 2)
        trial.feed(sequence, other_ids)
        expected = trial.run([*branch[:9], *ids[9:], ids[0]])[-1:]
        trial.expect_equal(trial.feed(fork, ids[:1]), expected, "a fork whose parent was cut back and fed again")
    for tokens in (-1, 1000):
        trial.expect_refused(f"a cut to {tokens} tokens", trial.backend.truncate, sequence, tokens)


def restored_sequence_continues_as_the_original(trial: Trial) -> None:
    ids, placement = trial.prompt(62), Placement(8, trial.offset(62), 3)
    texts = [[*ids, *trial.prompt(63 + i, 3)] for i in range(2)]
    # Cut inside the placement: the rows already added are in the state, the others still are.
    for tokens in (1, 9, len(ids)):
        # Compared with sequences fed in the same pieces, so that no difference is one of the batch's shape.
        original, *others = [trial.open() for _ in range(3)]
        for sequence in (original, *others):
            trial.feed(sequence, ids[:tokens], [placement])
        saved = trial.backend.export_state(original)
        copies = [trial.restore(saved) for _ in others]
        trial.backend.free(original)
        for array in saved.values():
            if array.flags.writeable:
                array.fill(0)
        lengths = [trial.backend.length(sequence) for sequence in copies]
        trial.expect(lengths == [tokens, tokens], f"restored sequences of {tokens} tokens have lengths {lengths}")
        for restored, other, text in zip(copies, others, texts, strict=True):
            found, expected = (trial.feed(sequence, text[tokens:], [placement]) for sequence in (restored, other))
            trial.expect_equal(found, expected, f"what follows {tokens} restored tokens")
        for sequence in (*copies, *others):
            trial.backend.free(sequence)


def restored_sequence_is_like_any_other(trial: Trial) -> None:
    ids, reply, able = trial.prompt(65), trial.prompt(66, 4), trial.backend.capabilities
    before = trial.backend.state_bytes()
    other, original = trial.open(), trial.open()
    for sequence in (other, original):
        trial.feed(sequence, ids)
    # Nothing is freed until the end: where state lies in memory may show in the last digits.
    first = trial.restore(trial.backend.export_state(original))
    restored = trial.fork(first) if able.fork else first
    if able.truncate:
        for sequence in (other, restored):
            trial.backend.truncate(sequence, 7)
        expected, found = (trial.feed(sequence, ids[7:]) for sequence in (other, restored))
        trial.expect_equal(found, expected, "a restored sequence after a cut")
    again = trial.restore(trial.backend.export_state(restored))
    expected, found = (trial.feed(sequence, reply) for sequence in (other, again))
    trial.expect_equal(found, expected, "a sequence saved and restored twice")
    for sequence in (other, original, first, restored, again):
        trial.backend.free(sequence)
    trial.expect(trial.backend.state_bytes() == before, "state is left behind by freed restored sequences")


def foreign_state_is_refused(trial: Trial) -> None:
    backend, ids = trial.backend, trial.prompt(67)
    trial.expect(backend.state_key() == backend.state_key() != "", "the state key is empty, or changes")
    sequence = trial.open()
    trial.expect_refused("saving an empty sequence", backend.export_state, sequence)
    trial.feed(sequence, ids, (), "none")
    held = backend.state_bytes()
    good = backend.export_state(sequence)
    name, array = next(iter(good.items()))
    for what, foreign in {
        "without tensors": {},
        "with another name": {f"{n} of another": a for n, a in good.items()},
        "with a tensor more": {**good, "more": array},
        "of another dtype": {**good, name: array.astype(np.float16 if array.dtype != np.float16 else np.float32)},
        "of another size": {**good, name: array[..., :-1]},
        "of another shape": {**good, name: array[np.newaxis]},
    }.items():
        trial.expect_refused(f"a state {what}", backend.import_state, foreign)
        trial.expect(backend.state_bytes() == held, f"a refused state {what} leaves state behind")
    found, expected = (trial.feed(continued, ids[:1]) for continued in (trial.restore(good), sequence))
    trial.expect_equal(found, expected, "a state restored after others were refused")
    trial.backend.free(sequence)
    trial.expect_refused("saving a freed sequence", backend.export_state, sequence)
