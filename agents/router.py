"""DomainRouter: which domain a message is of, by its likelihood under each domain's offset."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from langchain_core.messages import convert_to_messages
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.graph import END, MessagesState
from langgraph.types import Command

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.likelihood import likelihood_request, longest_prompt, speaker, total
from offset_runtime.agents.submission import arun_together, run_together
from offset_runtime.chat import chat_prompt, check_text
from offset_runtime.errors import InvalidRequestError, nearest_hint
from offset_runtime.ranking import RankedScore
from offset_runtime.request import Completion, Request
from offset_runtime.runtime import OffsetRuntime

UNSURE = "*"

# The message stands as the reply to this: where a turn-anchored offset acts on it. A request with the message's first
# words in it, as in training, would give away what a short message is known by.
_REQUEST = ({"role": "user", "content": "Write a text."},)


def merge_routes(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The reducer of `RoutedState`: what each router said last."""
    return {**known, **new}


class RoutedState(MessagesState):
    """Messages, and under `routes` what each router said: ``{"route": domain or None, "scores": {domain: nats}}``."""

    routes: Annotated[dict[str, Any], merge_routes]


@dataclass(frozen=True, slots=True)
class _Scoring:
    runtime: OffsetRuntime
    requests: Sequence[Request]
    tokens: int


class DomainRouter:
    """Scores a message under the offset of every domain and under the plain base, in one batch.

    `model`: a `ChatOffset`, which knows the offsets, or the name of a base model, with its offsets in `runtime` or
    in the folder ``offsets``. `domains`: two or more, whose offsets were trained in format `chat`; only those compare.
    `margin`: nats a token by which the likeliest domain must lead the next; below it the router is unsure. At 0 the
    likeliest is taken. `max_tokens`: how many of the message's first tokens are scored.

    A score is the log-likelihood of the message per token (so that `margin` means the same for short and long ones),
    less that on the plain base (so that 0 is a text that the domain does not expect more than the base does). The base
    is the same for all domains, so it moves the scores and not the route. The message is scored as a reply, since
    that is what an offset of the usual turn anchor acts on. No token is generated.

    Raises `InvalidRequestError` for fewer than two domains, one that is there twice, and values out of their range.
    The base is loaded, and offsets are read, at the first call.
    """

    def __init__(
        self,
        model: ChatOffset | str,
        domains: Sequence[str],
        *,
        margin: float = 0.0,
        max_tokens: int = 128,
        runtime: OffsetRuntime | None = None,
    ) -> None:
        _check_domains(domains)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < float("inf"):
            raise InvalidRequestError(f"margin={margin!r}; expected nats a token, 0 or more, such as 0.05")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidRequestError(f"max_tokens={max_tokens!r}; expected how many tokens to score, at least 1")
        self.domains = tuple(domains)
        self.margin = margin
        self.max_tokens = max_tokens
        self._model = speaker(model, runtime)

    def scores(self, text: str) -> list[RankedScore]:
        """The score of each domain, `difference_per_token`, the best first; of an empty text none.

        Raises `UnknownDomainError`, `OffsetFileError`, `BaseModelMismatchError`, `PromptFormatError` for an offset of
        another format, and what the engine raises.
        """
        scoring = self._prepare(text)
        return self._ranked(scoring, run_together(scoring.runtime, scoring.requests, self._model.max_retries))

    async def ascores(self, text: str) -> list[RankedScore]:
        """As `scores`, without blocking the event loop."""
        scoring = await asyncio.to_thread(self._prepare, text)
        return self._ranked(scoring, await arun_together(scoring.runtime, scoring.requests, self._model.max_retries))

    def route(self, text: str) -> str | None:
        """The domain of a text; None where the router is unsure, as it is of an empty text."""
        return self.choose(self.scores(text))

    async def aroute(self, text: str) -> str | None:
        """As `route`, without blocking the event loop."""
        return self.choose(await self.ascores(text))

    def choose(self, scores: Sequence[RankedScore]) -> str | None:
        """The domain that `scores` decide for, or None."""
        if not scores:
            return None
        best, second = scores[:2]
        lead = best.difference_per_token - second.difference_per_token
        return best.domain if lead >= self.margin else None

    @property
    def edge(self) -> Runnable[Any, str]:
        """The path of a conditional edge: gives the domain of the last message, or ``"*"`` where unsure.

        ``graph.add_conditional_edges(START, router.edge, {"news": "reporter", "*": "editor"})``. An edge cannot write
        into the state; `node` does.
        """

        def key(state: Any) -> str:
            return self.route(_last_text(state)) or UNSURE

        async def akey(state: Any) -> str:
            return await self.aroute(_last_text(state)) or UNSURE

        return RunnableLambda(key, akey, name="likelihood")

    def node(self, name: str, targets: Mapping[str, str]) -> Runnable[Any, Command[str]]:
        """A node that goes on to the target of the last message's domain, and keeps the scores in the state.

        `targets`: nodes by domain, and under ``"*"`` (required) the one for all else: no domain by a clear lead, one
        without a target, or no text. ``"END"`` ends. It updates ``routes[name]`` of a state such as `RoutedState`;
        give ``add_node`` its targets as `destinations`.
        """
        if UNSURE not in targets:
            raise InvalidRequestError(
                f"targets of {name!r} have no {UNSURE!r}; name the node for messages of no domain"
            )
        for key in targets:
            if key != UNSURE and key not in self.domains:
                raise InvalidRequestError(
                    f"target {key!r} of {name!r} is no domain of the router, which knows "
                    f"{', '.join(self.domains)}{nearest_hint(key, self.domains)}"
                )

        def outcome(scores: Sequence[RankedScore]) -> Command[str]:
            route = self.choose(scores)
            target = targets.get(route or UNSURE, targets[UNSURE])
            found = {"route": route, "scores": {score.domain: score.difference_per_token for score in scores}}
            return Command(goto=END if target == "END" else target, update={"routes": {name: found}})

        def run(state: Any) -> Command[str]:
            return outcome(self.scores(_last_text(state)))

        async def arun(state: Any) -> Command[str]:
            return outcome(await self.ascores(_last_text(state)))

        return RunnableLambda(run, arun, name=name)

    def _prepare(self, text: str) -> _Scoring:
        check_text(text)
        offsets = [self._model.for_domain(domain).offset() for domain in self.domains]
        runtime = self._model.load_runtime()
        tokenizer = runtime.backend.tokenizer
        room = longest_prompt(runtime) - len(chat_prompt(tokenizer, _REQUEST))
        # With room for none, the engine says what is wrong.
        reply = tokenizer.encode(text.strip())[: max(min(self.max_tokens, room), 1)]
        plain = (None, *offsets) if reply else ()
        asked = [likelihood_request(self._model, offset, _REQUEST, reply) for offset in plain]
        return _Scoring(runtime, asked, len(reply))

    def _ranked(self, scoring: _Scoring, completions: Sequence[Completion]) -> list[RankedScore]:
        if not completions:
            return []
        base, *found = map(total, completions)
        scores = [
            RankedScore(domain, "chat", scoring.tokens, logprob, base)
            for domain, logprob in zip(self.domains, found, strict=True)
        ]
        return sorted(scores, key=lambda score: -score.difference_per_token)


def _check_domains(domains: Sequence[str]) -> None:
    if isinstance(domains, str) or not all(isinstance(domain, str) for domain in domains):
        raise InvalidRequestError(f"domains={domains!r}; expected a list of names, such as ['news', 'speech']")
    if len(domains) < 2:
        raise InvalidRequestError(f"domains={list(domains)!r}: a router needs two domains or more to choose from")
    twice = sorted({domain for domain in domains if domains.count(domain) > 1})
    if twice:
        raise InvalidRequestError(f"domains={list(domains)!r} have {', '.join(twice)} twice; name each once")
    if UNSURE in domains:
        raise InvalidRequestError(f"{UNSURE!r} is no domain: it stands for messages of none")


def _last_text(state: Any) -> str:
    messages = state["messages"] if isinstance(state, Mapping) else state.messages
    return str(convert_to_messages(messages)[-1].text) if messages else ""
