"""Documents in the order in which they lead to the query."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from pydantic import ValidationError

from offset_runtime import EngineSettings, OffsetRuntime
from offset_runtime.agents import ChatOffset, OffsetReranker
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import ContextOverflowError, InvalidRequestError, PromptFormatError, UnknownDomainError

QUERY = "who pays?"
Scripted = Callable[..., ChatOffset]


def documents(*texts: str) -> list[Document]:
    return [Document(text, id=text, metadata={"source": f"{text}.txt"}) for text in texts]


def texts(found: Any) -> list[str]:
    return [document.page_content for document in found]


@pytest.fixture
def model(scripted: Scripted) -> ChatOffset:
    """A model that answers a document about fees with the query, and any other with something else."""
    return scripted(lambda prompt: QUERY if "fees" in prompt else "what else?")


def test_the_document_that_leads_to_the_query_comes_first(model: ChatOffset) -> None:
    found = OffsetReranker(model=model).compress_documents(documents("rain", "fees", "snow"), QUERY)
    assert texts(found)[0] == "fees"
    assert sorted(texts(found)) == ["fees", "rain", "snow"]
    assert texts(OffsetReranker(model=model, top_n=1).compress_documents(documents("rain", "fees"), QUERY)) == ["fees"]


def test_equals_keep_their_order(model: ChatOffset) -> None:
    given = [Document("rain", id="1"), Document("fees", id="2"), Document("rain", id="3")]
    found = OffsetReranker(model=model).compress_documents(given, QUERY)
    assert [document.id for document in found] == ["2", "1", "3"]


def test_scores_are_in_copies_of_the_metadata(model: ChatOffset) -> None:
    given = documents("rain", "fees")
    best, worst = OffsetReranker(model=model).compress_documents(given, QUERY)
    assert best.metadata["relevance_score"] > worst.metadata["relevance_score"]
    assert (best.id, best.metadata["source"]) == ("fees", "fees.txt")
    assert given == documents("rain", "fees"), "the caller's documents are as they were"


def test_async_finds_the_same(model: ChatOffset) -> None:
    reranker, given = OffsetReranker(model=model), documents("rain", "fees", "snow")
    assert asyncio.run(reranker.acompress_documents(given, QUERY)) == reranker.compress_documents(given, QUERY)


def scores(reranker: OffsetReranker) -> dict[str, float]:
    found = reranker.compress_documents(documents("rain", "fees"), QUERY)
    return {document.page_content: document.metadata["relevance_score"] for document in found}


def test_the_query_is_scored_under_the_domain(law: ChatOffset) -> None:
    base = scores(OffsetReranker(model=law, domain=None))
    own = scores(OffsetReranker(model=law, domain="law"))
    other = scores(OffsetReranker(model=law, domain="news"))
    assert base != own != other != base
    assert scores(OffsetReranker(model=law)) == own, "without a domain of its own it has the model's"
    assert scores(OffsetReranker(model="fake#law", runtime=law.runtime)) == own
    assert scores(OffsetReranker(model=law.configured({"strength": 0.0}))) == base


def test_a_score_is_per_token_of_the_query(fake_runtime: OffsetRuntime) -> None:
    def relevance(query: str) -> float:
        reranker = OffsetReranker(model="fake", runtime=fake_runtime)
        return float(reranker.compress_documents(documents("rain"), query)[0].metadata["relevance_score"])

    # The fake model gives every printable character about the same: ln(95) nats and the spread of its noise.
    assert relevance("a" * 8) == pytest.approx(relevance("a" * 80), abs=1.5)
    assert -8 < relevance("a" * 80) < -3


def test_all_documents_are_read_in_one_batch(watched: Callable[..., OffsetRuntime]) -> None:
    runtime = watched(expected=3, settings=EngineSettings(cache_bytes=0, max_step_tokens=4096))
    OffsetReranker(model="fake", runtime=runtime).compress_documents(documents("a", "b", "c"), QUERY)
    # The first pass may have begun with the first request; it waits for the others, which then share one.
    sizes = runtime.backend.batch_sizes  # type: ignore[attr-defined]
    assert sum(sizes) == 3
    assert len(sizes) <= 2


def test_more_documents_than_the_queue_holds_are_ranked_too() -> None:
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(max_waiting=1, max_running=1)) as runtime:
        many = documents(*"abcdefgh")
        assert sorted(texts(OffsetReranker(model="fake", runtime=runtime).compress_documents(many, QUERY))) == sorted(
            "abcdefgh"
        )


def test_a_long_document_is_cut_at_its_end(fake_runtime: OffsetRuntime) -> None:
    reranker = OffsetReranker(model="fake", runtime=fake_runtime, max_tokens=4)
    long, short = reranker.compress_documents([Document("rain and fees"), Document("rain")], QUERY)
    assert long.metadata == short.metadata
    assert {*texts([long, short])} == {"rain and fees", "rain"}, "what is returned is whole"


def test_a_document_beyond_the_context_is_cut_to_what_fits() -> None:
    with OffsetRuntime(FakeBackend(context_tokens=160)) as runtime:
        reranker = OffsetReranker(model="fake", runtime=runtime)
        one, other = reranker.compress_documents([Document("é" * 300 + "x"), Document("é" * 300 + "y")], QUERY)
        assert one.metadata == other.metadata
        with pytest.raises(ContextOverflowError, match="shorten the query"):
            reranker.compress_documents(documents("rain"), "q" * 200)


def test_no_documents_are_no_error_and_no_query_is_one(model: ChatOffset) -> None:
    assert OffsetReranker(model=model).compress_documents([], QUERY) == []
    with pytest.raises(InvalidRequestError, match="query is empty"):
        OffsetReranker(model=model).compress_documents(documents("rain"), " ")


def test_an_offset_it_cannot_use_is_named(fake_runtime: OffsetRuntime, make_offset: Any) -> None:
    identity = fake_runtime.backend.identity
    fake_runtime.register(make_offset(identity, "law", prompt_format="raw", anchor="sequence"))
    for domain, error in (("law", PromptFormatError), ("lwa", UnknownDomainError)):
        with pytest.raises(error, match=f"'{domain}'"):
            OffsetReranker(model="fake", domain=domain, runtime=fake_runtime).compress_documents(
                documents("rain"), QUERY
            )


@pytest.mark.parametrize("wrong", [{"top_n": 0}, {"max_tokens": 0}, {"topn": 3}])
def test_fields_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        OffsetReranker(model="fake", **wrong)  # type: ignore[arg-type]
