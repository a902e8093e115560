"""How often a likelihood router finds the domain of a text, beside asking the base model.

    python docs/experiments/routing.py --store examples/newsroom/offsets --docs news=news.jsonl --docs speech=... \\
        --called "news=a news report" --called "speech=..." --results routing.jsonl

Takes the first tokens of the last documents of each file, which no offset was trained on. The base model is asked in
its own words, without an offset, which of the domains the text is of, by their names and by what `--called` says they
are; its answer is the one that it finds likeliest, so nothing is generated there either. "Calibrated" is that less how
likely the answer is where the text is left out. Adds a line to the results for each text and length, with the score of
each domain in each way; `routing_report.py` makes tables of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from offset_runtime import LlamaCppOptions
from offset_runtime.agents import ChatOffset, DomainRouter
from offset_runtime.agents.likelihood import first_tokens, likelihood_request, total
from offset_runtime.agents.submission import run_together
from offset_runtime.documents import read_documents

Scores = dict[str, float]
# By its name, what each domain is called in the question.
Ways = Mapping[str, Mapping[str, str]]


def asked(model: ChatOffset, called: Mapping[str, str], text: str) -> Scores:
    """Log-likelihood of what each domain is called as the plain base's answer to which of them `text` is."""
    words = "one word" if all(name.isalpha() for name in called.values()) else "one of them"
    question = f"{text}\n\nWhich of {', '.join(called.values())} is this text? Answer with {words}."
    runtime, messages = model.load_runtime(), [{"role": "user", "content": question}]
    answers = [runtime.backend.tokenizer.encode(name) for name in called.values()]
    requests = [likelihood_request(model, None, messages, answer) for answer in answers]
    found = run_together(runtime, requests, model.max_retries)
    return dict(zip(called, map(total, found), strict=True))


def held_out(paths: Sequence[str], documents: int) -> dict[str, list[str]]:
    named = (path.split("=", 1) for path in paths)
    return {name: [item.text for item in read_documents([path]).items[-documents:]] for name, path in named}


def judged(router: DomainRouter, model: ChatOffset, ways: Ways, text: str) -> dict[str, Scores]:
    """The score of each domain, by the router and in each way to ask, as it is and calibrated."""
    found = {"router": {str(score.domain): score.difference_per_token for score in router.scores(text)}}
    start = first_tokens(model.load_runtime(), text.strip(), router.max_tokens)
    for way, called in ways.items():
        answer, empty = asked(model, called, start), asked(model, called, "")
        found[way] = answer
        found[f"{way}, calibrated"] = {name: answer[name] - empty[name] for name in called}
    return {way: {name: round(score, 3) for name, score in scores.items()} for way, scores in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, help="of llama.cpp")
    parser.add_argument("--store", required=True)
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    parser.add_argument("--called", action="append", required=True, metavar="DOMAIN=WORDS")
    parser.add_argument("--documents", type=int, default=40, help="of each domain, from the end of its file")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64], help="of each document, from its start")
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    texts = held_out(given.docs, given.documents)
    domains = list(texts)
    described = dict(pair.split("=", 1) for pair in given.called)
    ways = {"names": dict(zip(domains, domains, strict=True)), "words": {name: described[name] for name in domains}}
    options = LlamaCppOptions() if given.threads is None else LlamaCppOptions(n_threads=given.threads)
    model = ChatOffset(model=given.model, backend=given.backend, llama_cpp=options, store=given.store)
    with given.results.open("a", encoding="utf-8") as file:
        for tokens in given.tokens:
            router = DomainRouter(model, domains, max_tokens=tokens)
            for domain in domains:
                for text in texts[domain]:
                    row = {"domain": domain, "tokens": tokens, **judged(router, model, ways, text)}
                    print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
