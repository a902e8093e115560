"""How often a likelihood router finds the domain of a text, beside asking the base model.

    python docs/experiments/routing.py --store examples/newsroom/offsets --docs news=news.jsonl --docs speech=...

Takes the first tokens of the last documents of each file, which no offset was trained on. The base model is asked in
its own words, without an offset, and its answer is the name that it finds likeliest, so nothing is generated there
either; "calibrated" is that less how likely the name is where the text is left out. Prints a confusion matrix for
each, and what share of the texts is routed, and how often rightly, at rising margins.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offset_runtime.agents import ChatOffset, DomainRouter
from offset_runtime.agents.likelihood import first_tokens, likelihood_request, total
from offset_runtime.agents.submission import run_together
from offset_runtime.documents import read_documents

MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2)


@dataclass(slots=True)
class Confusion:
    """How many texts of each domain (rows) were given to each (columns)."""

    domains: Sequence[str]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, domain: str, given: str) -> None:
        self.counts[domain, given] += 1

    def show(self, title: str) -> None:
        right = sum(self.counts[domain, domain] for domain in self.domains)
        texts = self.counts.total()
        width = max(map(len, self.domains)) + 2
        print(f"\n{title}: {right} of {texts} right, {100 * right / texts:.0f} %")
        print(" " * width + "".join(f"{name:>{width}}" for name in self.domains))
        for domain in self.domains:
            row = "".join(f"{self.counts[domain, given]:>{width}}" for given in self.domains)
            print(f"{domain:<{width}}{row}")


def asked(model: ChatOffset, domains: Sequence[str], text: str) -> dict[str, float]:
    """Log-likelihood of each domain's name as the plain base's answer to which of them `text` is."""
    question = f"{text}\n\nWhich of {', '.join(domains)} is this text? Answer with one word."
    runtime, messages = model.load_runtime(), [{"role": "user", "content": question}]
    names = [runtime.backend.tokenizer.encode(name) for name in domains]
    requests = [likelihood_request(model, None, messages, name) for name in names]
    found = run_together(runtime, requests, model.max_retries)
    return dict(zip(domains, map(total, found), strict=True))


def best(scores: Mapping[str, float]) -> str:
    return max(scores, key=lambda name: scores[name])


def held_out(paths: Sequence[str], documents: int) -> dict[str, list[str]]:
    named = (path.split("=", 1) for path in paths)
    return {name: [item.text for item in read_documents([path]).items[-documents:]] for name, path in named}


def show_margins(leads: Sequence[tuple[float, bool]]) -> None:
    print("\nmargin   routed   right of those")
    for margin in MARGINS:
        kept = [right for lead, right in leads if lead >= margin]
        share = f"{100 * sum(kept) / len(kept):.0f} %" if kept else "-"
        print(f"{margin:6.2f}   {100 * len(kept) / len(leads):4.0f} %   {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--store", required=True)
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    parser.add_argument("--documents", type=int, default=20, help="of each domain, from the end of its file")
    parser.add_argument("--tokens", type=int, default=40, help="of each document, from its beginning")
    given = parser.parse_args()
    texts = held_out(given.docs, given.documents)
    domains = list(texts)
    model = ChatOffset(model=given.model, backend=given.backend, store=given.store)
    router = DomainRouter(model, domains, max_tokens=given.tokens)
    routed, plain, calibrated = Confusion(domains), Confusion(domains), Confusion(domains)
    empty = asked(model, domains, "")
    leads: list[tuple[float, bool]] = []
    for domain in domains:
        for text in texts[domain]:
            scores = router.scores(text)
            first, second = (score.difference_per_token for score in scores[:2])
            routed.add(domain, str(scores[0].domain))
            leads.append((first - second, scores[0].domain == domain))
            answer = asked(model, domains, first_tokens(model.load_runtime(), text.strip(), given.tokens))
            plain.add(domain, best(answer))
            calibrated.add(domain, best({name: answer[name] - empty[name] for name in domains}))
    routed.show("likelihood router")
    plain.show("base model, asked")
    calibrated.show("base model, asked, calibrated")
    show_margins(leads)


if __name__ == "__main__":
    main()
