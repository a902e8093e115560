"""How well queries find their documents under their domain's offset, another domain's, and none.

    python docs/experiments/reranking.py --store examples/newsroom/offsets --docs news=news.jsonl --docs speech=... \\
        --results reranking.jsonl

A query is the first sentence of a held-out document, and the rest of that document is to be found among the rests of
others of the same domain. Adds a line to the results for each query and offset, with the rank of the right document;
another domain's offset is that of the next one named. `reranking_report.py` makes a table of them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from langchain_core.documents import Document

from offset_runtime import LlamaCppOptions
from offset_runtime.agents import ChatOffset, OffsetReranker
from offset_runtime.documents import read_documents

# A sentence ends so, and has a few words.
_SENTENCE = re.compile(r"^(.{20,240}?[.!?:;])\s+(.{80,})$", re.DOTALL)


def pairs(path: str, count: int) -> list[tuple[str, str]]:
    """(first sentence, rest) of the last `count` documents of `path` that have both."""
    split = (_SENTENCE.match(item.text.strip()) for item in read_documents([path]).items)
    return [(found[1], found[2]) for found in split if found][-count:]


def rank(reranker: OffsetReranker, query: str, rests: Sequence[str], right: int) -> int:
    """The place, from 1, of the document with index `right`."""
    documents = [Document(text, metadata={"index": index}) for index, text in enumerate(rests)]
    ranked = reranker.compress_documents(documents, query)
    return 1 + next(place for place, document in enumerate(ranked) if document.metadata["index"] == right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, help="of llama.cpp")
    parser.add_argument("--store", required=True)
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    parser.add_argument("--documents", type=int, default=20, help="of each domain; each is asked for among them all")
    parser.add_argument("--tokens", type=int, default=64, help="of each document that are read")
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    files = dict(path.split("=", 1) for path in given.docs)
    names = list(files)
    options = LlamaCppOptions() if given.threads is None else LlamaCppOptions(n_threads=given.threads)
    model = ChatOffset(model=given.model, backend=given.backend, llama_cpp=options, store=given.store)
    with given.results.open("a", encoding="utf-8") as file:
        for place, domain in enumerate(names):
            found = pairs(files[domain], given.documents)
            wrong = names[(place + 1) % len(names)]
            under = {"base": None, "own": domain, "other": wrong}
            rerankers = {
                name: OffsetReranker(model=model, domain=offset, max_tokens=given.tokens)
                for name, offset in under.items()
            }
            rests = [rest for _, rest in found]
            for right, (query, _) in enumerate(found):
                ranks = {name: rank(reranker, query, rests, right) for name, reranker in rerankers.items()}
                row = {"domain": domain, "other": wrong, "documents": len(found), "ranks": ranks}
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
