"""Answer from documents: find some by their words, rank them by likelihood under a domain, and answer in that domain.

    python examples/rag_reranking.py

The retriever counts shared words, rare ones more, and falls for "so that it". The re-ranker scores how likely each
document makes the question, under the offset of `computing`; nothing is generated for that, and it runs on the same
base that then writes the answer.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from offset_runtime.agents import ChatOffset, OffsetReranker

STORE = Path(__file__).parent / "newsroom" / "offsets"
DOCUMENTS = [
    "A stack is a list from which the item that was put in last is taken out first.",
    "A queue is a list from which the item that was put in first is taken out first.",
    "A cache is a small and quick memory that keeps what was read last, so that it need not be read again.",
    "A compiler reads the text of a program and writes the same program in the language of the machine.",
    "An interpreter reads the text of a program and runs it at once, without writing another program.",
    "A router is a machine that reads the address on a packet and passes it on towards its network.",
    "A parser reads text and finds its structure by the rules of a grammar.",
    "Garbage collection finds memory that a program no longer uses, and lets it be used again.",
]
QUESTION = "What does a program need so that it can be run on a machine?"


class WordRetriever(BaseRetriever):
    """The `k` documents that share most words with the query, rare words counting more."""

    texts: list[str]
    k: int = 5

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = [set(re.findall(r"\w+", text.lower())) for text in self.texts]
        known = Counter(word for each in words for word in each)
        asked = set(re.findall(r"\w+", query.lower()))
        scores = [sum(math.log(1 + len(words) / known[word]) for word in each & asked) for each in words]
        order = sorted(range(len(words)), key=lambda index: -scores[index])[: self.k]
        return [Document(self.texts[index], metadata={"words": scores[index]}) for index in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("question", nargs="?", default=QUESTION)
    given = parser.parse_args()
    model = ChatOffset(model=given.model, store=STORE, domain="computing", max_tokens=40)

    found = WordRetriever(texts=DOCUMENTS).invoke(given.question)
    print("by words:")
    for document in found:
        print(f"  {document.metadata['words']:6.2f}  {document.page_content}")

    ranked = OffsetReranker(model=model, top_n=3).compress_documents(found, given.question)
    print("by likelihood of the question, nats a token:")
    for document in ranked:
        print(f"  {document.metadata['relevance_score']:6.2f}  {document.page_content}")

    told = f"Answer in one sentence, from this text:\n{ranked[0].page_content}"
    reply = model.invoke([("system", told), ("user", given.question)])
    print(f"{given.question}\n  {' '.join(reply.text.split())}")


if __name__ == "__main__":
    main()
