"""Which domain a message goes to, and what the scores say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from offset_runtime import EngineSettings, OffsetRuntime
from offset_runtime.agents import ChatOffset, DomainRouter, RoutedState
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.chat import chat_prompt
from offset_runtime.errors import ContextOverflowError, InvalidRequestError, PromptFormatError, UnknownDomainError
from offset_runtime.placement import place
from offset_runtime.ranking import RankedScore

DOMAINS = ["law", "news"]


@pytest.fixture
def router(law: ChatOffset) -> DomainRouter:
    return DomainRouter(law, DOMAINS)


def texts_of_both(router: DomainRouter) -> dict[str, str]:
    """A text for each domain, by domain."""
    found = {str(router.route(text)): text for text in (f"message {number}" for number in range(20))}
    assert sorted(found) == DOMAINS, "among twenty texts are some of each domain"
    return found


def direct(law: ChatOffset, domain: str | None, text: str) -> float:
    """Log-likelihood of `text` as the reply to a request, from one plain pass of the model."""
    backend = FakeBackend()
    prompt = chat_prompt(backend.tokenizer, [{"role": "user", "content": "Write a text."}])
    ids = (*prompt, *backend.tokenizer.encode(text))
    offset = law.for_domain(domain).offset()
    placements = () if offset is None else (place(offset, len(prompt)),)
    [logits] = backend.forward([Chunk(backend.allocate(), ids, placements, "all")])
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(sum(logprobs[at - 1, ids[at]] for at in range(len(prompt), len(ids))))


def test_a_score_is_the_likelihood_per_token_less_that_on_the_base(router: DomainRouter, law: ChatOffset) -> None:
    text = "Who pays?"
    base = direct(law, None, text)
    expected = {domain: (direct(law, domain, text) - base) / len(text) for domain in DOMAINS}
    scores = router.scores(text)
    assert {score.domain: score.difference_per_token for score in scores} == pytest.approx(expected, abs=1e-4)
    assert [score.tokens for score in scores] == [len(text)] * 2
    assert scores[0].difference_per_token >= scores[1].difference_per_token


def test_an_offset_without_effect_scores_nothing_however_long_or_odd_the_text(
    fake_runtime: OffsetRuntime, make_offset: Any
) -> None:
    for domain in DOMAINS:
        fake_runtime.register(make_offset(fake_runtime.backend.identity, domain, scale=0.0))
    router = DomainRouter("fake", DOMAINS, runtime=fake_runtime)
    for text in ("a", "\u00ff" * 40):
        assert [score.difference_per_token for score in router.scores(text)] == pytest.approx([0.0, 0.0])


def ranked(domain: str, tokens: int, per_token: float) -> RankedScore:
    return RankedScore(domain, "chat", tokens, tokens * per_token, 0.0)


@pytest.mark.parametrize("tokens", [2, 200])
def test_the_margin_is_in_nats_a_token_whatever_the_length(law: ChatOffset, tokens: int) -> None:
    scores = [ranked("news", tokens, -1.0), ranked("law", tokens, -1.25)]
    assert DomainRouter(law, DOMAINS, margin=0.25).choose(scores) == "news"
    assert DomainRouter(law, DOMAINS, margin=0.26).choose(scores) is None


def test_texts_go_to_different_domains_and_async_says_the_same(router: DomainRouter) -> None:
    for domain, text in texts_of_both(router).items():
        assert asyncio.run(router.aroute(text)) == domain
        assert asyncio.run(router.ascores(text)) == router.scores(text)


def test_all_domains_and_the_base_are_scored_in_one_batch(
    watched: Callable[..., OffsetRuntime], with_domains: Callable[[OffsetRuntime], OffsetRuntime]
) -> None:
    runtime = with_domains(watched(expected=3, settings=EngineSettings(cache_bytes=0, max_step_tokens=4096)))
    DomainRouter("fake", DOMAINS, runtime=runtime).scores("hello")
    # The first pass may have begun with the first request; it waits for the others, which then share one.
    sizes = runtime.backend.batch_sizes  # type: ignore[attr-defined]
    assert sum(sizes) == 3
    assert len(sizes) <= 2


@pytest.mark.parametrize("text", ["", " \n "])
def test_of_an_empty_text_the_router_is_unsure(router: DomainRouter, text: str) -> None:
    assert router.scores(text) == []
    assert router.route(text) is None


def test_only_the_first_tokens_of_a_long_text_count(law: ChatOffset) -> None:
    router = DomainRouter(law, DOMAINS, max_tokens=5)
    assert router.scores("hello, and more") == router.scores("hello") != router.scores("hullo")


def test_a_text_longer_than_the_context_is_cut_and_a_context_without_room_is_an_error(with_domains: Any) -> None:
    with OffsetRuntime(FakeBackend(context_tokens=64)) as runtime:
        [score, _] = DomainRouter("fake", DOMAINS, runtime=with_domains(runtime)).scores("x" * 500)
        assert 0 < score.tokens < 64
    with OffsetRuntime(FakeBackend(context_tokens=8)) as runtime, pytest.raises(ContextOverflowError):
        DomainRouter("fake", DOMAINS, runtime=with_domains(runtime)).scores("x" * 500)


def test_an_offset_of_another_prompt_format_is_refused(fake_runtime: OffsetRuntime, make_offset: Any) -> None:
    identity = fake_runtime.backend.identity
    fake_runtime.register(make_offset(identity, "law"))
    fake_runtime.register(make_offset(identity, "news", prompt_format="raw", anchor="sequence"))
    with pytest.raises(PromptFormatError, match=r"'news'.*'raw'.*chat"):
        DomainRouter("fake", DOMAINS, runtime=fake_runtime).scores("hello")


def test_an_unknown_domain_is_named_with_the_nearest(law: ChatOffset, store: Path) -> None:
    router = DomainRouter(ChatOffset(model="fake", store=store, runtime=law.runtime), ["law", "newz"])
    with pytest.raises(UnknownDomainError, match=r"'newz'.*did you mean 'news'"):
        router.scores("hello")


@pytest.mark.parametrize(
    ("domains", "settings", "told"),
    [
        (["law"], {}, "two domains or more"),
        ("law", {}, "expected a list of names"),
        (["law", "news", "law"], {}, "law twice"),
        (["law", "*"], {}, "is no domain"),
        (DOMAINS, {"margin": -0.1}, "nats a token"),
        (DOMAINS, {"margin": float("nan")}, "nats a token"),
        (DOMAINS, {"max_tokens": 0}, "at least 1"),
    ],
)
def test_what_no_router_can_be_made_of(law: ChatOffset, domains: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        DomainRouter(law, domains, **settings)


def test_a_wrapped_model_is_refused(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match=r"Binding; expected a ChatOffset"):
        DomainRouter(law.bind(temperature=0), DOMAINS)  # type: ignore[arg-type]


def graph_of(router: DomainRouter, **settings: Any) -> Any:
    graph: Any = StateGraph(RoutedState)
    targets = {"law": "lawyer", "news": "reporter", "*": "END"}
    graph.add_node("desk", router.node("desk", targets), destinations=("lawyer", "reporter", END))
    for name in ("lawyer", "reporter"):
        graph.add_node(name, lambda state, name=name: {"messages": [AIMessage(name)]})
    graph.add_edge(START, "desk")
    return graph.compile(**settings)


def test_the_node_goes_to_the_domains_target_and_keeps_the_scores(router: DomainRouter) -> None:
    for domain, text in texts_of_both(router).items():
        state = graph_of(router).invoke({"messages": [("user", text)]})
        assert state["messages"][-1].text == {"law": "lawyer", "news": "reporter"}[domain]
        expected = {score.domain: score.difference_per_token for score in router.scores(text)}
        assert state["routes"] == {"desk": {"route": domain, "scores": pytest.approx(expected)}}


def test_a_state_without_routes_keeps_no_scores(router: DomainRouter) -> None:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("desk", router.node("desk", {"*": "END"}), destinations=(END,))
    graph.add_edge(START, "desk")
    assert set(graph.compile().invoke({"messages": [("user", "hello")]})) == {"messages"}


def test_the_node_goes_to_the_star_where_unsure(law: ChatOffset) -> None:
    state = asyncio.run(graph_of(DomainRouter(law, DOMAINS, margin=1e6)).ainvoke({"messages": [("user", "hello")]}))
    assert [message.text for message in state["messages"]] == ["hello"]
    assert state["routes"]["desk"]["route"] is None
    assert sorted(state["routes"]["desk"]["scores"]) == DOMAINS


def test_the_edge_is_the_path_of_a_conditional_edge(router: DomainRouter) -> None:
    graph: Any = StateGraph(MessagesState)
    for name in ("lawyer", "reporter"):
        graph.add_node(name, lambda state, name=name: {"messages": [AIMessage(name)]})
    graph.add_conditional_edges(START, router.edge, {"law": "lawyer", "news": "reporter", "*": END})
    app, text = graph.compile(), texts_of_both(router)["news"]
    assert app.invoke({"messages": [("user", text)]})["messages"][-1].text == "reporter"
    assert asyncio.run(app.ainvoke({"messages": [("user", text)]}))["messages"][-1].text == "reporter"


def test_the_last_message_is_what_is_routed_and_no_message_is_unsure(router: DomainRouter) -> None:
    texts = texts_of_both(router)
    messages = [HumanMessage(texts["law"]), AIMessage(texts["news"], name="someone")]
    assert router.edge.invoke({"messages": messages}) == "news"
    assert router.edge.invoke({"messages": []}) == "*"


@pytest.mark.parametrize(
    ("targets", "told"),
    [({"law": "a"}, r"have no '\*'"), ({"lw": "a", "*": "b"}, r"'lw'.*is no domain.*did you mean 'law'")],
)
def test_targets_that_the_node_cannot_use(router: DomainRouter, targets: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        router.node("desk", targets)
