"""What the layout of a shared transcript, and the offsets of its authors, do to the next reader's loss.

    python docs/experiments/histories.py --store examples/newsroom/offsets --docs news=news.jsonl --docs ...

Each held-out document of a domain is the reply of an agent of that domain to a transcript of turns by agents of all
other domains. The transcript is laid out as `agent_node` does: separate, shared, verbatim with the authors' offsets
kept, and verbatim with them dropped. Prints a line of JSON for each domain and layout: perplexity of the reply under
the reader's own offset and on the plain base.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from offset_runtime import OffsetRuntime, SamplingParams
from offset_runtime.agents.messages import template_turns
from offset_runtime.agents.transcript import INSTRUCTIONS, History, Transcript
from offset_runtime.documents import Document, read_documents
from offset_runtime.models import ModelSpec
from offset_runtime.offset import DomainOffset

REPLY_TOKENS = 48
DOCUMENTS = 24
LAYOUTS: tuple[tuple[str, History, bool], ...] = (
    ("separate", "separate", False),
    ("shared", "shared", False),
    ("verbatim, offsets dropped", "verbatim", False),
    ("verbatim, offsets kept", "verbatim", True),
)


Domains = dict[str, list[Document]]


@dataclass(slots=True)
class Tally:
    """Natural log-likelihood of reply tokens."""

    logprob: float = 0.0
    tokens: int = 0
    replies: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / self.tokens)


def transcript(
    runtime: OffsetRuntime, documents: dict[str, list[Document]], reader: str, index: int
) -> list[BaseMessage]:
    """What the user asked, and a turn of an agent of each other domain."""
    turns: list[BaseMessage] = [HumanMessage("Each of you writes a text.")]
    for author in (name for name in documents if name != reader):
        text = documents[author][-(index % 40) - 1].text
        said = runtime.backend.tokenizer.decode(runtime.backend.tokenizer.encode(text)[:REPLY_TOKENS])
        turns.append(AIMessage(said, name=author, additional_kwargs={INSTRUCTIONS: instructions(text)}))
    return turns


def instructions(text: str) -> str:
    return f"Continue this text: {' '.join(text.split()[:6])}"


def measure(
    runtime: OffsetRuntime, documents: Domains, reader: str, history: History, keep: bool, plain: bool
) -> Tally:
    tally, tokenizer = Tally(), runtime.backend.tokenizer
    for index, document in enumerate(documents[reader][-40:][:DOCUMENTS]):
        shown = Transcript(reader, instructions(document.text), None, history).show(
            transcript(runtime, documents, reader, index)
        )
        spoken = [place for place, message in enumerate(shown) if message.type == "ai"]
        turns, sources = template_turns(shown, spoken)
        authors: dict[int, DomainOffset | None] = {
            turn: runtime.offsets[str(shown[index].name)] if keep else None for turn, index in sources.items()
        }
        request = runtime.chat_request(turns, domain=None if plain else reader, turn_offsets=authors)
        reply = tokenizer.encode(document.text)[:REPLY_TOKENS]
        scored = replace(
            request,
            prompt_ids=(*request.prompt_ids, *reply),
            score_from=len(request.prompt_ids),
            sampling=SamplingParams(max_tokens=0),
        )
        found = runtime.run(scored)
        tally.logprob += sum(found.prompt_logprobs)
        tally.tokens += len(found.prompt_logprobs)
        tally.replies += 1
    return tally


def rows(
    runtime: OffsetRuntime, documents: dict[str, list[Document]], readers: Sequence[str]
) -> Iterator[dict[str, object]]:
    for reader in readers:
        for label, history, keep in LAYOUTS:
            ours, base = (measure(runtime, documents, reader, history, keep, plain) for plain in (False, True))
            yield {
                "reader": reader,
                "history": label,
                "perplexity_base": base.perplexity,
                "perplexity_with": ours.perplexity,
                "gain_percent": 100 * (1 - ours.perplexity / base.perplexity),
                "replies": ours.replies,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--store", required=True)
    parser.add_argument("--docs", action="append", required=True, metavar="DOMAIN=FILE.jsonl")
    given = parser.parse_args()
    documents = {name: read_documents([path]).items for name, path in (item.split("=", 1) for item in given.docs)}
    with OffsetRuntime.load(ModelSpec(base=given.model), store=given.store) as runtime:
        for row in rows(runtime, documents, list(documents)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
