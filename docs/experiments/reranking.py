"""How well queries find their documents under their domain's offset, another domain's, and none.

    python docs/experiments/reranking.py --store examples/newsroom/offsets --docs news=news.jsonl --docs speech=...

A query is the first sentence of a held-out document, and the rest of that document is to be found among the rests of
others of the same domain. Prints for each domain the mean reciprocal rank under the plain base, the own offset and
that of the next domain; chance is beside it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from langchain_core.documents import Document

from offset_runtime.agents import ChatOffset, OffsetReranker
from offset_runtime.documents import read_documents

# A sentence ends so, and has a few words.
_SENTENCE = re.compile(r"^(.{20,240}?[.!?:;])\s+(.{80,})$", re.DOTALL)


def pairs(path: str, count: int) -> list[tuple[str, str]]:
    """(first sentence, rest) of the last `count` documents of `path` that have both."""
    split = (_SENTENCE.match(item.text.strip()) for item in read_documents([path]).items)
    return [(found[1], found[2]) for found in split if found][-count:]


def reciprocal_rank(reranker: OffsetReranker, query: str, rests: Sequence[str], right: int) -> float:
    documents = [Document(text, metadata={"right": index == right}) for index, text in enumerate(rests)]
    ranked = reranker.compress_documents(documents, query)
    return 1 / (1 + next(place for place, document in enumerate(ranked) if document.metadata["right"]))


def mean_reciprocal_rank(reranker: OffsetReranker, found: Sequence[tuple[str, str]], queries: int) -> float:
    rests = [rest for _, rest in found]
    asked = range(min(queries, len(found)))
    return sum(reciprocal_rank(reranker, found[index][0], rests, index) for index in asked) / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--store", required=True)
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    parser.add_argument("--queries", type=int, default=11, help="of each domain")
    parser.add_argument("--distractors", type=int, default=10, help="documents beside the right one")
    parser.add_argument("--tokens", type=int, default=64, help="of each document that are read")
    given = parser.parse_args()
    files = dict(path.split("=", 1) for path in given.docs)
    names = list(files)
    model = ChatOffset(model=given.model, backend=given.backend, store=given.store)
    print(f"{'domain':<12}{'queries':>8}{'chance':>8}{'base':>8}{'own':>8}{'wrong':>8}  (wrong: whose)")
    for index, domain in enumerate(names):
        found = pairs(files[domain], given.distractors + 1)
        if len(found) < 2:
            print(f"{domain:<12} has no two documents with a first sentence and a rest")
            continue
        wrong = names[(index + 1) % len(names)]
        figures = [
            mean_reciprocal_rank(
                OffsetReranker(model=model, domain=each, max_tokens=given.tokens), found, given.queries
            )
            for each in (None, domain, wrong)
        ]
        chance = sum(1 / rank for rank in range(1, len(found) + 1)) / len(found)
        shown = "".join(f"{figure:>8.3f}" for figure in (chance, *figures))
        print(f"{domain:<12}{min(given.queries, len(found)):>8}{shown}  ({wrong})", flush=True)


if __name__ == "__main__":
    main()
