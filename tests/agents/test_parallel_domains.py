"""Eight parallel branches in eight domains: their tokens interleave, and each reply is its own."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langgraph.graph import START, MessagesState, StateGraph

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, agent_node
from offset_runtime.backends.fake import FakeBackend

Way = Literal["sync", "async"]
DOMAINS = ["art", "biology", "cooking", "drama", "economics", "film", "geology", "history"]
QUESTION: Any = {"messages": [("user", "hello")]}


def fan(model: ChatOffset) -> Any:
    """A graph in which one agent for each domain answers at the same time."""
    builder = StateGraph(MessagesState)
    for domain in DOMAINS:
        builder.add_node(domain, agent_node(domain, model.for_domain(domain), system_prompt="Answer."))
        builder.add_edge(START, domain)
    return builder.compile()


async def tokens(graph: Any, runtime: Any, way: Way) -> list[tuple[str, str]]:
    """(domain, text) of each token in the order in which the graph streams them."""
    found = []

    def take(part: Any) -> None:
        message, metadata = part
        if message.content:
            runtime.backend.consume()
            assert metadata["agent"] == metadata["langgraph_node"] == metadata["domain"]
            found.append((metadata["domain"], str(message.content)))

    if way == "sync":
        # LangGraph's own number of threads goes by the machine's cores; one of them waits for what is streamed.
        many: Any = {"max_concurrency": len(DOMAINS) + 1}
        for part in graph.stream(QUESTION, many, stream_mode="messages"):
            take(part)
    else:
        async for part in graph.astream(QUESTION, stream_mode="messages"):
            take(part)
    return found


@pytest.fixture
def in_step(watched: Any, make_offset: Any) -> OffsetRuntime:
    """A runtime with eight domains, which starts once eight requests came in, and goes on as tokens are read."""
    runtime: OffsetRuntime = watched(expected=len(DOMAINS), in_step=True)
    for seed, domain in enumerate(DOMAINS):
        runtime.register(make_offset(runtime.backend.identity, domain, seed=seed))
    return runtime


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_tokens_of_all_branches_are_interleaved(in_step: Any, way: Way) -> None:
    found = await tokens(fan(ChatOffset(model="fake", runtime=in_step, max_tokens=8)), in_step, way)

    written = dict.fromkeys(DOMAINS, 0)
    leads = []
    for domain, _ in found:
        written[domain] += 1
        leads.append(max(written.values()) - min(written.values()))
    assert written == dict.fromkeys(DOMAINS, 8)
    # The branch that reads the shared prompt for all is a step ahead.
    assert max(leads) <= 2
    assert in_step.backend.batch_sizes.count(len(DOMAINS)) >= 6


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_each_reply_equals_its_branch_run_alone(in_step: Any, make_offset: Any, way: Way) -> None:
    found = await tokens(fan(ChatOffset(model="fake", runtime=in_step, max_tokens=8)), in_step, way)
    streamed = {domain: "".join(text for of, text in found if of == domain) for domain in DOMAINS}

    alone = {}
    with OffsetRuntime(FakeBackend()) as runtime:
        for seed, domain in enumerate(DOMAINS):
            runtime.register(make_offset(runtime.backend.identity, domain, seed=seed))
            model = ChatOffset(model="fake", runtime=runtime, max_tokens=8, domain=domain)
            alone[domain] = model.invoke([("system", "Answer."), ("user", "hello")]).content

    assert streamed == alone
    assert len(set(alone.values())) == len(DOMAINS)
