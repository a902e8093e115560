"""Where an offset belongs and how long it should be: anchors x positions x history, gain and retention.

    python docs/experiments/anchors.py --docs news=news.jsonl --docs speech=speech.jsonl --results results.jsonl

Trains one offset for each domain, anchor, number of positions and seed with one short recipe (18 steps), and measures
all of them behind histories of 0 and 64 tokens of the own and of the next domain; those of 8 positions and seed 0
behind 256 tokens and on the other domains too. One line of JSON an offset;
those that the results hold already are not trained again. `anchors_report.py` makes the tables and the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offset_runtime.backends.base import Chunk
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.chat import chat_prompt
from offset_runtime.documents import Document, read_documents
from offset_runtime.layout import Example, lay_out
from offset_runtime.models import ModelSpec, load_backend
from offset_runtime.objective import Objective, Prepared
from offset_runtime.offset import Anchor
from offset_runtime.placement import anchor_index
from offset_runtime.retention import base_replies

STEPS, RATE, L2, RETENTION_WEIGHT = 18, 1.5e-2, 0.01, 1.5
DOCUMENTS_A_STEP, REPLIES_A_STEP = 4, 3
DOCUMENT_TOKENS, REPLY_TOKENS = 32, 16
TRAINING_DOCUMENTS, TEST_DOCUMENTS, HISTORY_DOCUMENTS = 100, 12, 8
MOST_POSITIONS = 16
SEEDS, POSITIONS = (0, 1, 2), (8, 3, 1, 5, 16)
ANCHORS: tuple[Anchor, ...] = ("turn", "sequence")
HISTORIES = (("none", 0), ("own", 64), ("off", 64), ("own", 256), ("off", 256))
LONG_HISTORY = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """One offset to train."""

    domain: str
    anchor: Anchor
    positions: int
    seed: int

    @property
    def in_depth(self) -> bool:
        """Whether long histories and other domains are measured too, which cost a sequence anchor whole prompts."""
        return self.positions == 8 and self.seed == 0

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.domain, self.anchor, self.positions, self.seed


class Preparation:
    """Examples with everything that no offset changes, computed once for all offsets of an anchor."""

    def __init__(self, backend: TorchBackend, documents: dict[str, list[Document]]) -> None:
        self._backend = backend
        self._documents = documents
        self._replies = {split: base_replies(backend, split, reply_tokens=REPLY_TOKENS) for split in ("train", "test")}
        self._made: dict[Any, list[Prepared]] = {}

    def training(self, plan: Plan) -> list[Prepared]:
        found, _ = lay_out(
            self._documents[plan.domain][:TRAINING_DOCUMENTS],
            self._backend.tokenizer,
            "chat",
            max_tokens=DOCUMENT_TOKENS,
            seed=plan.seed,
        )
        return self._prepared(("training", plan.domain, plan.anchor, plan.seed), found, plan.anchor)

    def replies(self, split: str, anchor: Anchor) -> list[Prepared]:
        return self._prepared(("replies", split, anchor), self._replies[split], anchor, keep_base=True)

    def test(self, domain: str, anchor: Anchor, history: tuple[str, int]) -> list[Prepared]:
        return self._prepared(("test", domain, anchor, history), self._test_examples(domain, history), anchor)

    def _test_examples(self, domain: str, history: tuple[str, int]) -> list[Example]:
        kind, tokens = history
        tokenizer, held_out = self._backend.tokenizer, self._documents[domain][-40:]
        names = sorted(self._documents)
        other = domain if kind == "own" else names[(names.index(domain) + 1) % len(names)]
        count = HISTORY_DOCUMENTS if tokens else TEST_DOCUMENTS
        examples = []
        for index, document in enumerate(held_out[:count]):
            reply = tokenizer.encode(document.text)[:DOCUMENT_TOKENS]
            words = " ".join(document.text.split()[:6])
            earlier = self._documents[other][-40:][20 + index :] + self._documents[other][-40:][:10]
            messages = [*self._history(earlier, tokens), {"role": "user", "content": f"Continue this text: {words}"}]
            examples.append(Example(tuple(chat_prompt(tokenizer, messages)), tuple(reply), index))
        return examples

    def _history(self, documents: list[Document], tokens: int) -> list[dict[str, str]]:
        """An earlier request and its reply, of `tokens` tokens of documents."""
        if tokens == 0:
            return []
        ids: list[int] = []
        for document in documents:
            ids += self._backend.tokenizer.encode(document.text + "\n\n")
            if len(ids) >= tokens:
                break
        text = self._backend.tokenizer.decode(ids[:tokens])
        return [{"role": "user", "content": "Write a text."}, {"role": "assistant", "content": text}]

    def _prepared(
        self, key: Any, examples: list[Example], anchor: Anchor, *, keep_base: bool = False
    ) -> list[Prepared]:
        if key not in self._made:
            self._made[key] = [self._prepare(example, anchor) for example in examples]
            if keep_base:
                self._made[key] = with_base(self._backend, self._made[key])
        return self._made[key]

    def _prepare(self, example: Example, anchor: Anchor) -> Prepared:
        """With the tokens before the last 16 of the prompt read once, where no offset of this anchor touches them."""
        start = 0 if anchor == "sequence" else max(0, len(example.prompt_ids) - MOST_POSITIONS)
        sequence = self._backend.allocate()
        if start:
            self._backend.forward([Chunk(sequence, example.token_ids[:start], (), "none")])
        return Prepared(example, start, start, self._backend.state(sequence))


def with_base(backend: TorchBackend, prepared: list[Prepared]) -> list[Prepared]:
    """The same with the base's log-probabilities."""
    plain = Objective(backend, "base", "turn", 1)
    zero = torch.zeros(1, backend.identity.hidden_size)
    found = []
    with torch.no_grad():
        for item in prepared:
            [logits] = plain._logits([item], zero)
            found.append(Prepared(item.example, item.start, item.anchor, item.prefix, logits.log_softmax(-1).half()))
    return found


def anchored(items: Sequence[Prepared], plan: Plan) -> list[Prepared]:
    """The same with the offset's first row where the anchor has it."""
    return [
        Prepared(
            item.example,
            item.start,
            anchor_index(plan.anchor, plan.positions, item.example.anchored_tokens, domain=plan.domain),
            item.prefix,
            item.base,
        )
        for item in items
    ]


def shuffled(items: list[Prepared], size: int, chooser: random.Random) -> Iterator[list[Prepared]]:
    while True:
        order = list(items)
        chooser.shuffle(order)
        yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))


def train(backend: TorchBackend, preparation: Preparation, plan: Plan) -> torch.Tensor:
    """The short recipe: that of `offset-runtime train`, with fewer steps, smaller batches and no choice of step."""
    objective = Objective(backend, plan.domain, plan.anchor, plan.positions)
    chooser = random.Random(plan.seed)
    documents = shuffled(anchored(preparation.training(plan), plan), DOCUMENTS_A_STEP, chooser)
    replies = shuffled(anchored(preparation.replies("train", plan.anchor), plan), REPLIES_A_STEP, chooser)
    delta = torch.zeros(plan.positions, backend.identity.hidden_size, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=RATE, betas=(0.9, 0.99))
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))
        adam.zero_grad()
        objective.document_step(next(documents), delta)
        objective.penalty_step(delta, L2)
        objective.retention_step(next(replies), delta, RETENTION_WEIGHT)
        adam.step()
    return delta.detach()


class Measurement:
    """Losses of the base, measured once, and what each offset makes of them."""

    def __init__(self, backend: TorchBackend, preparation: Preparation, domains: Sequence[str]) -> None:
        self._backend, self._preparation, self._domains = backend, preparation, domains
        self._base: dict[Any, float] = {}

    def of(self, plan: Plan, delta: torch.Tensor) -> dict[str, Any]:
        objective = Objective(self._backend, plan.domain, plan.anchor, plan.positions)
        gains = {
            f"{kind}-{tokens}": self._gain(objective, plan, plan.domain, (kind, tokens), delta)
            for kind, tokens in HISTORIES
            if tokens < LONG_HISTORY or plan.in_depth
        }
        others = [name for name in self._domains if name != plan.domain] if plan.in_depth else []
        wrong = {name: self._gain(objective, plan, name, HISTORIES[0], delta) for name in others}
        test = anchored(self._preparation.replies("test", plan.anchor), plan)
        return {"gain": gains, "on_other_domains": wrong, "kl": objective.divergence(test, delta)}

    def _gain(
        self, objective: Objective, plan: Plan, domain: str, history: tuple[str, int], delta: torch.Tensor
    ) -> float:
        examples = self._preparation.test(domain, plan.anchor, history)
        if (domain, history) not in self._base:
            self._base[domain, history] = objective.document_loss(examples, torch.zeros_like(delta))
        return 100 * (
            1 - math.exp(objective.document_loss(anchored(examples, plan), delta) - self._base[domain, history])
        )


def plans(domains: Sequence[str], positions: Sequence[int], seeds: Sequence[int]) -> Iterator[Plan]:
    """All offsets, the widest comparison first: a run that is stopped early has something of everything."""
    for seed in seeds:
        for count in positions:
            for domain in domains:
                for anchor in ANCHORS:
                    yield Plan(domain, anchor, count, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; offsets lie in a folder beside it")
    given = parser.parse_args()
    documents = {name: read_documents([path]).items for name, path in (item.split("=", 1) for item in given.docs)}
    known = given.results.read_text().splitlines() if given.results.exists() else []
    done = {tuple(json.loads(line)[key] for key in ("domain", "anchor", "positions", "seed")) for line in known}
    backend = load_backend(ModelSpec(base=given.model, backend="torch"))
    assert isinstance(backend, TorchBackend)
    preparation = Preparation(backend, documents)
    measurement = Measurement(backend, preparation, list(documents))
    folder = given.results.with_suffix("")
    folder.mkdir(exist_ok=True)
    for plan in plans(list(documents), given.positions, given.seeds):
        if plan.key in done:
            continue
        started = time.monotonic()
        delta = train(backend, preparation, plan)
        trained = time.monotonic()
        row = {
            "domain": plan.domain,
            "anchor": plan.anchor,
            "positions": plan.positions,
            "seed": plan.seed,
            **measurement.of(plan, delta),
        }
        np.save(folder / f"{plan.domain}-{plan.anchor}-{plan.positions}-{plan.seed}.npy", delta.numpy())
        with given.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{plan}: {trained - started:.0f} s + {time.monotonic() - trained:.0f} s, {row}", flush=True)


if __name__ == "__main__":
    main()
