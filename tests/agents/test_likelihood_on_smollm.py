"""Routing and re-ranking on the real base, under the offsets of the newsroom."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.documents import Document

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, DomainRouter, OffsetReranker

pytestmark = pytest.mark.real_model

OFFSETS = Path(__file__).parents[2] / "examples/newsroom/offsets"


@pytest.fixture(scope="module")
def chat(smollm_runtime: OffsetRuntime) -> ChatOffset:
    return ChatOffset(model="smollm2-135m", runtime=smollm_runtime, store=OFFSETS)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("Police in the capital said on Monday that two men had been arrested after the fire.", "news"),
        # As the documents of that domain are: classes, without indentation.
        (
            "class Reader:\n\n def __init__(self, file):\n self.file = file\n\n def close(self):\n self.file.close()",
            "code",
        ),
    ],
)
def test_a_plain_case_goes_to_its_domain(chat: ChatOffset, text: str, domain: str) -> None:
    best, *others = DomainRouter(chat, ["news", "speech", "computing", "code"]).scores(text)
    assert best.domain == domain
    assert best.difference_per_token > 0, "its own domain expects it more than the base does"
    assert all(other.difference_per_token < best.difference_per_token for other in others)


@pytest.mark.parametrize("domain", [None, "news"])
def test_the_document_that_answers_the_question_comes_first(chat: ChatOffset, domain: str | None) -> None:
    texts = (
        "The harbour was closed for three days after the storm broke the northern wall.",
        "A recipe for bread: flour, water, salt and yeast, left to rise for an hour.",
        "The committee elected a new treasurer and thanked the old one.",
    )
    reranker = OffsetReranker(model=chat, domain=domain, top_n=1)
    for text, query in zip(texts[:2], ("Why was the harbour closed?", "How do I bake bread?"), strict=True):
        [best] = reranker.compress_documents([Document(each) for each in texts], query)
        assert best.page_content == text
