"""Gain, wrong-domain control, gain by position and retention, checked against their definitions."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from offset_runtime import DomainOffset
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.documents import Document, Documents
from offset_runtime.errors import (
    BaseModelMismatchError,
    DocumentError,
    InvalidRequestError,
    PromptFormatError,
    UnknownDomainError,
)
from offset_runtime.evaluation import EvaluationProgress, evaluate, gain_interval
from offset_runtime.layout import Example, lay_out
from offset_runtime.placement import place
from offset_runtime.retention import (
    base_replies,
    greedy_replies,
    instruction_prompt,
    instructions,
    measure_retention,
)
from offset_runtime.sampling import log_softmax

MakeOffset = Callable[..., DomainOffset]

LEGAL = Documents(
    [
        Document("The court held that the clause applies to both parties."),
        Document("The appeal is dismissed with costs, and the order below stands."),
        Document("Under section 4 the tenant may end the lease by notice in writing."),
        Document("Held."),
    ]
)
CODE = Documents(
    [Document("def area(r):\n    return 3.14159 * r * r"), Document("for name in names:\n    print(name)")]
)
CHATS = Documents(
    [
        Document(
            "a", (("user", "Hello"), ("assistant", "Good day to you"), ("user", "Bye"), ("assistant", "Good bye"))
        ),
        Document("b", (("user", "What is it?"), ("assistant", "It is a lamp"))),
    ]
)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def offsets(backend: FakeBackend, make_offset: MakeOffset) -> dict[str, DomainOffset]:
    return {
        "legal": make_offset(backend.identity, "legal", seed=1),
        "code": make_offset(backend.identity, "code", seed=2, anchor="sequence", prompt_format="raw"),
        "spare": make_offset(backend.identity, "spare", seed=3, positions=5),
    }


def losses(
    backend: Backend, documents: Documents, offset: DomainOffset, *, used: bool, cut: int = 24
) -> list[list[float]]:
    """Negative log-probabilities by document: one sequence, one pass, nothing shared."""
    examples, _ = lay_out(documents.items, backend.tokenizer, offset.prompt_format, max_tokens=cut)
    found = []
    for example in examples:
        sequence = backend.allocate()
        placements = (place(offset, example.anchored_tokens),) if used else ()
        [logits] = backend.forward([Chunk(sequence, example.token_ids[:-1], placements, "all")])
        backend.free(sequence)
        rows = log_softmax(logits[-len(example.targets) :])
        found.append([-float(rows[i, token]) for i, token in enumerate(example.targets)])
    return found


def perplexity(found: list[list[float]]) -> float:
    return float(np.exp(np.mean([loss for document in found for loss in document])))


def test_every_cell_of_the_matrix_is_the_gain_of_that_offset_in_its_own_format(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    documents = {"legal": LEGAL, "code": CODE}
    found = evaluate(backend, offsets, documents, max_tokens=24)
    for row, texts in documents.items():
        assert list(found.matrix[row]) == ["legal", "code", "spare"]
        for column, offset in offsets.items():
            gain = found.matrix[row][column]
            assert gain is not None
            without = perplexity(losses(backend, texts, offset, used=False))
            ours = perplexity(losses(backend, texts, offset, used=True))
            assert gain.perplexity_without == pytest.approx(without, rel=1e-5)
            assert gain.perplexity_with == pytest.approx(ours, rel=1e-5)
            assert gain.percent == pytest.approx(100 * (1 - ours / without), abs=1e-3)
    assert backend.open_sequences == 0


def test_a_domains_own_figures_are_those_of_the_diagonal(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    found = evaluate(backend, offsets, {"legal": LEGAL, "code": CODE}, max_tokens=24)
    assert list(found.domains) == ["legal", "code"]
    for name, domain in found.domains.items():
        assert domain.gain == found.matrix[name][name]
        assert domain.tokens == sum(domain.by_position.documents)


def test_cross_entropy_by_position_is_the_mean_over_the_replies_that_reach_it(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    found = evaluate(backend, offsets, {"legal": LEGAL, "code": CODE}, max_tokens=60)
    chat, raw = found.domains["legal"].by_position, found.domains["code"].by_position
    assert chat.positions == tuple(range(60))
    # In raw format nothing precedes the first token, so it is not predicted.
    assert raw.positions == tuple(range(1, 39))
    assert chat.documents == (4,) * 5 + (3,) * 50 + (2,) * 5
    first = losses(backend, LEGAL, offsets["legal"], used=True, cut=60)
    assert chat.with_offset[0] == pytest.approx(np.mean([document[0] for document in first]), rel=1e-5)
    mean = np.average(chat.without, weights=chat.documents)
    assert np.exp(mean) == pytest.approx(found.domains["legal"].gain.perplexity_without, rel=1e-5)


def test_an_offset_of_strength_zero_gains_exactly_nothing_and_keeps_everything(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    zero = {name: offset.scaled(0) for name, offset in offsets.items()}
    found = evaluate(backend, zero, {"legal": LEGAL, "code": CODE}, max_tokens=24)
    for cells in found.matrix.values():
        assert [gain.percent for gain in cells.values() if gain] == [0.0, 0.0, 0.0]
    for domain in found.domains.values():
        assert domain.gain.interval == (0.0, 0.0)
        assert domain.by_position.without == domain.by_position.with_offset
        assert domain.retention.kl == 0.0


def test_retention_is_that_of_the_domains_own_offset(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    found = evaluate(backend, offsets, {"legal": LEGAL, "code": CODE}, max_tokens=24)
    replies = base_replies(backend, "test")
    for name in ("legal", "code"):
        assert found.domains[name].retention == measure_retention(backend, replies, offsets[name])


def test_json_has_the_documented_shape_and_is_json(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    found = json.loads(json.dumps(evaluate(backend, offsets, {"legal": LEGAL}, max_tokens=24).as_json()))
    assert list(found) == ["domains", "matrix", "matrix_intervals", "by_position"]
    legal = found["domains"]["legal"]
    assert {"perplexity_without", "perplexity_with", "gain_percent", "retention"} <= legal.keys()
    assert list(legal["retention"]) == ["kl", "reply_perplexity_without", "reply_perplexity_with"]
    assert legal["gain_percent"] == pytest.approx(100 * (1 - legal["perplexity_with"] / legal["perplexity_without"]))
    assert found["matrix"]["legal"]["legal"] == legal["gain_percent"]
    assert found["matrix_intervals"]["legal"]["legal"] == legal["gain_interval"]
    assert list(found["matrix"]["legal"]) == ["legal", "code", "spare"]
    assert list(found["by_position"]["legal"]) == ["positions", "without", "with", "documents"]


def test_too_short_documents_are_counted_and_said(
    backend: FakeBackend, offsets: dict[str, DomainOffset], caplog: pytest.LogCaptureFixture
) -> None:
    documents = Documents([*LEGAL.items, Document("Hm."), Document("No.")], Counter({"duplicated": 1}))
    with caplog.at_level(logging.WARNING, logger="offset_runtime"):
        found = evaluate(backend, offsets, {"legal": documents}, max_tokens=24)
    assert found.domains["legal"].documents == 4
    assert found.domains["legal"].left_out == {"duplicated": 1, "too short": 2}
    assert "domain 'legal': left out 2 too short of 6 documents" in caplog.text


def test_documents_beyond_the_context_are_left_out_and_counted(make_offset: MakeOffset) -> None:
    backend = FakeBackend(context_tokens=150)
    long = Document("joined", (("user", "x" * 200), ("assistant", "far too long")))
    documents = Documents([*CHATS.items, long])
    offset = make_offset(backend.identity, "legal")
    found = evaluate(backend, {"legal": offset}, {"legal": documents}, max_tokens=24)
    assert found.domains["legal"].documents == 2
    assert found.domains["legal"].left_out == {"too long": 1}


def test_conversations_are_measured_turn_by_turn_and_count_as_one_document(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    found = evaluate(backend, offsets, {"legal": CHATS}, max_tokens=24)
    assert found.domains["legal"].documents == 2
    assert found.domains["legal"].by_position.documents[0] == 3
    # Conversations cannot be laid out in raw format, so that offset has no figure here.
    assert found.matrix["legal"]["code"] is None
    assert found.as_json()["matrix"]["legal"]["code"] is None


def test_progress_ends_at_its_total(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    seen: list[EvaluationProgress] = []
    evaluate(backend, offsets, {"legal": LEGAL, "code": CODE}, max_tokens=24, progress=seen.append)
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert {at.stage for at in seen} == {"legal", "code", "retention"}
    assert seen[-1].done == seen[-1].total
    # Six documents in two formats each under the base, and under three offsets; then the replies.
    assert seen[-1].total == 6 * (2 + 3) + len(instructions("test")) * (2 + 2)


def test_documents_without_an_offset_name_the_nearest(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    with pytest.raises(UnknownDomainError, match=r"unknown domain 'legl'.*did you mean 'legal'"):
        evaluate(backend, offsets, {"legl": LEGAL})


def test_each_empty_set_has_its_own_error(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    with pytest.raises(DocumentError, match="no documents to evaluate on; give held-out documents"):
        evaluate(backend, offsets, {})
    with pytest.raises(InvalidRequestError, match="no offsets to evaluate; train one"):
        evaluate(backend, {}, {"legal": LEGAL})
    with pytest.raises(DocumentError, match="domain 'legal': no documents to evaluate on"):
        evaluate(backend, offsets, {"legal": Documents()})
    with pytest.raises(DocumentError, match=r"none of 1 documents can be used.*1 are shorter than 4 tokens"):
        evaluate(backend, offsets, {"legal": Documents([Document("Hm.")])})


def test_max_tokens_too_small_for_any_document_is_an_error(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 4, found 3"):
        evaluate(backend, offsets, {"legal": LEGAL}, max_tokens=3)


def test_an_offset_of_another_base_model_is_an_error(
    backend: FakeBackend, offsets: dict[str, DomainOffset], make_offset: MakeOffset
) -> None:
    foreign = make_offset(backend.identity.model_copy(update={"vocab_size": 99}), "spare")
    with pytest.raises(BaseModelMismatchError, match="'spare' was made for another base model: vocab_size 99"):
        evaluate(backend, {**offsets, "spare": foreign}, {"legal": LEGAL})


def test_a_format_the_model_cannot_have_is_an_error(backend: FakeBackend, make_offset: MakeOffset) -> None:
    offset = make_offset(backend.identity, "legal", anchor="sequence", prompt_format="bos")
    with pytest.raises(PromptFormatError, match="start token"):
        evaluate(backend, {"legal": offset}, {"legal": LEGAL})


def test_conversations_for_an_offset_of_another_format_are_an_error(
    backend: FakeBackend, offsets: dict[str, DomainOffset]
) -> None:
    with pytest.raises(DocumentError, match="conversations can only be laid out in format 'chat'"):
        evaluate(backend, offsets, {"code": CHATS})


def test_measuring_on_the_training_documents_is_said(
    backend: FakeBackend, make_offset: MakeOffset, caplog: pytest.LogCaptureFixture
) -> None:
    trained = make_offset(backend.identity, "legal")
    trained = DomainOffset("legal", trained.tensor, "turn", "chat", trained.base, documents_digest=LEGAL.digest())
    with caplog.at_level(logging.WARNING, logger="offset_runtime"):
        evaluate(backend, {"legal": trained}, {"legal": LEGAL}, max_tokens=24)
    assert "these are the documents it was trained on" in caplog.text


def test_the_interval_holds_the_gain_and_narrows_with_more_documents() -> None:
    rng = np.random.default_rng(5)

    def sums(count: int) -> np.ndarray:
        tokens = rng.integers(20, 64, count).astype(float)
        without = tokens * rng.normal(3.0, 0.5, count)
        return np.stack([tokens, without, without - tokens * rng.normal(0.2, 0.1, count)], axis=1)

    few, many = sums(8), sums(200)
    narrow, wide = gain_interval(many), gain_interval(few)
    assert narrow is not None
    assert wide is not None
    tokens, without, ours = many.sum(axis=0)
    assert narrow[0] < 100 * (1 - np.exp((ours - without) / tokens)) < narrow[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert gain_interval(few) == wide


def test_the_interval_is_paired() -> None:
    # Documents differ widely in difficulty, yet each gains exactly the same.
    tokens = np.full(10, 32.0)
    without = tokens * np.linspace(1.0, 6.0, 10)
    interval = gain_interval(np.stack([tokens, without, without - tokens * 0.1], axis=1))
    expected = 100 * (1 - np.exp(-0.1))
    assert interval == pytest.approx((expected, expected))


def test_one_document_has_no_interval(backend: FakeBackend, offsets: dict[str, DomainOffset]) -> None:
    documents = Documents(LEGAL.items[:1])
    found = evaluate(backend, offsets, {"legal": documents}, max_tokens=24)
    assert found.domains["legal"].gain.interval is None
    assert found.as_json()["domains"]["legal"]["gain_interval"] is None


@pytest.mark.real_model
def test_on_the_real_model_a_zero_offset_changes_nothing_and_a_random_one_does(
    smollm: Backend, make_offset: MakeOffset, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few short replies of the base are enough here, and keep the test short.
    prompts = [instruction_prompt(smollm, text) for _, text in instructions("test")[:4]]
    replies = [Example(tuple(p), tuple(r)) for p, r in zip(prompts, greedy_replies(smollm, prompts, 6), strict=True)]
    monkeypatch.setattr("offset_runtime.evaluation.base_replies", lambda backend, split: replies)
    texts = [
        f"The committee met on {day} and agreed that the bridge over the river should be repaired before winter."
        for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "the first of May")
    ]
    documents = Documents([Document(text) for text in texts])
    offsets = {
        "zero": make_offset(smollm.identity, "zero").scaled(0),
        "loud": make_offset(smollm.identity, "loud", scale=1.0),
        "start": make_offset(smollm.identity, "start", anchor="sequence").scaled(0),
    }
    found = evaluate(smollm, offsets, {"zero": documents}, max_tokens=12)
    zero = found.domains["zero"]
    # On llama.cpp the last bits of a logit depend on which cells of its cache a sequence lies in.
    nothing = pytest.approx(0.0, abs={"torch": 0.0, "llama_cpp": 0.02}[smollm.name])
    assert zero.documents == 8
    assert zero.gain.percent == nothing
    assert zero.retention.kl == nothing
    assert 1.5 < zero.gain.perplexity_without < 40
    assert 1.0 < zero.retention.reply_perplexity_without < 5
    loud, start = found.matrix["zero"]["loud"], found.matrix["zero"]["start"]
    assert loud is not None
    assert start is not None
    assert loud.percent < -5
    assert start.percent == nothing
