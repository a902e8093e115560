"""From a workflow to a graph: who runs, with what, and in which batch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from offset_runtime import LlamaCppOptions, OffsetRuntime
from offset_runtime.errors import (
    BaseModelMismatchError,
    ContextOverflowError,
    PromptFormatError,
    QueueFullError,
    WorkflowError,
)
from offset_runtime.graphs import (
    AgentFinished,
    Workflow,
    build_graph,
    load_workflow,
    make_graph,
    run_workflow,
    sqlite_checkpoints,
)
from offset_runtime.graphs.builder import chat_model
from offset_runtime.graphs.schema import Agent

Write = Callable[[str], Path]
Scripted = Callable[[dict[str, str]], OffsetRuntime]
Turns = Callable[..., list[tuple[str, str]]]
INPUT: Any = {"messages": [HumanMessage("hello")]}


def workflow(agents: dict[str, Any], edges: list[dict[str, Any]], **keys: Any) -> Workflow:
    made = {"version": 1, "name": "test", "model": {"base": "fake"}, "agents": agents, "edges": edges, **keys}
    return Workflow.model_validate(made)


def test_nodes_bear_the_names_of_the_agents(write_workflow: Write) -> None:
    path = write_workflow("""
        version: 1
        name: newsroom
        model: {base: fake}
        agents: {reporter: {}, the-editor: {}}
        edges:
          - {source: START, target: reporter}
          - {source: reporter, target: the-editor}
          - {source: the-editor, target: END}
    """)
    graph = make_graph(path)
    assert set(graph.nodes) == {"__start__", "reporter", "the-editor"}
    assert graph.name == "newsroom"


def test_agents_run_in_order_and_read_what_was_said(scripted: Scripted, turns: Turns) -> None:
    runtime = scripted({"Turn it into": "a speech", "Write": "the lead"})
    made = workflow(
        {"reporter": {"system_prompt": "Write."}, "speaker": {"system_prompt": "Turn it into a speech."}},
        [
            {"source": "START", "target": "reporter"},
            {"source": "reporter", "target": "speaker"},
            {"source": "speaker", "target": "END"},
        ],
    )
    assert turns(build_graph(made, runtime=runtime)) == [("reporter", "the lead"), ("speaker", "a speech")]


def test_settings_reach_the_chat_model() -> None:
    agent = Agent(domain="news", strength=0.5, temperature=1, max_tokens=7, top_k=3, seed=5, stop=("x",), timeout_s=2.0)
    made = workflow({"a": {}}, [{"source": "START", "target": "a"}], domains={"news": "n.safetensors"}, store="kept")
    model = chat_model(made, agent)
    assert (model.model, model.domain, model.strength) == ("fake", "news", 0.5)
    assert (model.temperature, model.max_tokens, model.top_k, model.seed) == (1, 7, 3, 5)
    assert (model.stop, model.timeout, model.top_p) == (["x"], 2.0, None)
    assert model.domains == {"news": Path("n.safetensors")}
    assert model.store == Path("kept")


FORK = workflow(
    {"first": {"max_tokens": 2}, "left": {"max_tokens": 12}, "right": {"max_tokens": 12}, "last": {"max_tokens": 2}},
    [
        {"source": "START", "target": "first"},
        {"source": "first", "target": ["left", "right"]},
        {"source": ["left", "right"], "target": "last"},
        {"source": "last", "target": "END"},
    ],
)


def _expect_two_after_the_first(runtime: OffsetRuntime) -> None:
    # From the second request on, passes wait until both branches have asked.
    backend: Any = runtime.backend
    backend.expected = 3


@pytest.mark.parametrize("asynchronous", [False, True], ids=["stream", "astream"])
def test_parallel_branches_share_the_passes_of_one_batch(
    watched: Callable[..., OffsetRuntime], asynchronous: bool
) -> None:
    runtime = watched()
    graph = build_graph(FORK, runtime=runtime)

    def note(update: dict[str, Any]) -> None:
        if "first" in update:
            _expect_two_after_the_first(runtime)

    async def run() -> None:
        async for update in graph.astream(INPUT, stream_mode="updates"):
            note(update)

    if asynchronous:
        asyncio.run(run())
    else:
        for update in graph.stream(INPUT, stream_mode="updates"):
            note(update)
    sizes = runtime.backend.batch_sizes  # type: ignore[attr-defined]
    assert sizes[:2] == [1, 1], "the first agent alone"
    assert sizes.count(2) >= 10, f"both branches write 12 tokens, together: {sizes}"
    assert sizes[-2:] == [1, 1], "the last agent waits for both"


def test_a_list_of_sources_waits_for_all_of_them(scripted: Scripted, turns: Turns) -> None:
    runtime = scripted({"a:": "end"})
    made = workflow(
        {"a": {}, "b": {}, "c": {}, "end": {}},
        [
            {"source": "START", "target": ["a", "b"]},
            {"source": "b", "target": "c"},
            {"source": ["a", "c"], "target": "end"},
            {"source": "end", "target": "END"},
        ],
    )
    names = [agent for agent, _ in turns(build_graph(made, runtime=runtime))]
    assert sorted(names[:2]) == ["a", "b"]
    assert names[2:] == ["c", "end"]


def test_a_conditional_edge_goes_by_the_reply(scripted: Scripted, turns: Turns) -> None:
    runtime = scripted({"Pay": "paid", "sort": "This is about a Refund."})
    made = workflow(
        {"triage": {"system_prompt": "sort"}, "billing": {"system_prompt": "Pay"}, "tech": {}},
        [
            {"source": "START", "target": "triage"},
            {
                "source": "triage",
                "path": "reply_contains",
                "targets": {"bug": "tech", "refund": "billing", "*": "END"},
            },
            {"source": ["billing"], "target": "END"},
            {"source": ["tech"], "target": "END"},
        ],
    )
    assert [agent for agent, _ in turns(build_graph(made, runtime=runtime))] == ["triage", "billing"]


def test_two_conditional_edges_may_leave_one_agent(scripted: Scripted, turns: Turns, tmp_path: Path) -> None:
    (tmp_path / "two_ways.py").write_text("def pick(state):\n    return 'n'\n")
    path = tmp_path / "w.yaml"
    path.write_text("""
version: 1
name: two
model: {base: fake}
agents: {a: {}, b: {}, c: {}}
edges:
  - {source: START, target: a}
  - {source: a, path: reply_contains, targets: {yes please: b, "*": END}}
  - {source: a, path: "two_ways:pick", targets: {n: c}}
  - {source: b, target: END}
  - {source: c, target: END}
""")
    found = turns(make_graph(path, runtime=scripted({"hello": "Yes please!"})))
    assert sorted(agent for agent, _ in found) == ["a", "b", "c"]


DESK = workflow(
    {
        "desk": {"system_prompt": "Sort.", "handoffs": ["billing", "tech"]},
        "billing": {"system_prompt": "Pay.", "description": "refunds"},
        "tech": {"system_prompt": "Repair."},
    },
    [
        {"source": "START", "target": "desk"},
        {"source": "billing", "target": "END"},
        {"source": "tech", "target": "END"},
    ],
)


@pytest.mark.parametrize(
    ("reply", "agents"),
    [
        ("One moment.\nhandoff: billing", ["desk", "billing"]),
        ("handoff: tech", ["desk", "tech"]),
        ("I know that myself.", ["desk"]),
        ("handoff: sales", ["desk"]),
    ],
)
def test_an_agent_hands_over_to_whom_it_names(scripted: Scripted, turns: Turns, reply: str, agents: list[str]) -> None:
    runtime = scripted({"Pay.": "paid", "Repair.": "repaired", "Sort.": reply})
    assert [agent for agent, _ in turns(build_graph(DESK, runtime=runtime))] == agents


def test_the_prompt_of_an_agent_with_handoffs_says_how(scripted: Scripted, turns: Turns) -> None:
    runtime = scripted(
        {'end your reply with a line "handoff: NAME", where NAME is one of: billing (refunds), tech.': "told"}
    )
    assert turns(build_graph(DESK, runtime=runtime)) == [("desk", "told")]


def test_a_reader_sees_only_whom_it_reads(scripted: Scripted, turns: Turns) -> None:
    runtime = scripted(
        {"Sum up.\n<|im_end|>": "x", "secret": "I saw it", "Sum up.": "I did not see it", "Tell": "secret"}
    )
    made = workflow(
        {
            "a": {"system_prompt": "Tell."},
            "b": {"system_prompt": "Sum up.", "reads": ["START"]},
            "c": {"system_prompt": "Sum up."},
        },
        [
            {"source": "START", "target": "a"},
            {"source": "a", "target": ["b", "c"]},
            {"source": ["b", "c"], "target": "END"},
        ],
    )
    assert dict(turns(build_graph(made, runtime=runtime))) == {
        "a": "secret",
        "b": "I did not see it",
        "c": "I saw it",
    }


def test_each_agent_speaks_in_its_own_domain(
    write_workflow: Write, save_offset: Callable[..., Path], turns: Turns, fake_runtime: OffsetRuntime
) -> None:
    save_offset("news", seed=1)
    save_offset("legal", seed=2)
    path = write_workflow("""
        version: 1
        name: domains
        model: {base: fake}
        domains: {news: offsets/news.safetensors, legal: offsets/legal.safetensors}
        agents:
          plain: {max_tokens: 8}
          off: {domain: news, strength: 0.0, max_tokens: 8}
          news: {domain: news, max_tokens: 8}
          legal: {domain: legal, max_tokens: 8}
        edges:
          - {source: START, target: [plain, off, news, legal]}
          - {source: [plain, off, news, legal], target: END}
    """)
    replies = dict(turns(make_graph(path, runtime=fake_runtime)))
    assert replies["plain"] == replies["off"]
    assert len({replies["plain"], replies["news"], replies["legal"]}) == 3


def test_tokens_stream_with_agent_and_domain(
    write_workflow: Write, save_offset: Callable[..., Path], fake_runtime: OffsetRuntime
) -> None:
    save_offset("news")
    path = write_workflow("""
        version: 1
        name: tokens
        model: {base: fake}
        domains: {news: offsets/news.safetensors}
        agents: {a: {domain: news, max_tokens: 5}}
        edges: [{source: START, target: a}, {source: a, target: END}]
    """)
    graph = make_graph(path, runtime=fake_runtime)
    told = [(m["agent"], m["domain"]) for chunk, m in graph.stream(INPUT, stream_mode="messages") if chunk.text]
    assert told == [("a", "news")] * 5


ONE = """
version: 1
name: one
model: {{base: fake}}
{keys}
agents: {{a: {agent}}}
edges: [{{source: START, target: a}}, {{source: a, target: END}}]
"""


def test_a_context_overflow_surfaces_with_its_numbers(write_workflow: Write, fake_runtime: OffsetRuntime) -> None:
    path = write_workflow(ONE.format(keys="", agent="{max_tokens: 5000}"))
    with pytest.raises(ContextOverflowError, match=r"max_tokens of 5000 = \d+ exceeds the context of 4096 tokens"):
        make_graph(path, runtime=fake_runtime).invoke(INPUT)


def test_an_offset_of_another_base_surfaces(
    write_workflow: Write, save_offset: Callable[..., Path], fake_runtime: OffsetRuntime
) -> None:
    save_offset("news", identity=fake_runtime.backend.identity.model_copy(update={"vocab_size": 9}))
    path = write_workflow(ONE.format(keys="domains: {news: offsets/news.safetensors}", agent="{domain: news}"))
    with pytest.raises(BaseModelMismatchError, match="vocab_size 9"):
        make_graph(path, runtime=fake_runtime).invoke(INPUT)


def test_an_offset_of_another_format_surfaces_even_unchecked(
    save_offset: Callable[..., Path], fake_runtime: OffsetRuntime
) -> None:
    file = save_offset("news", prompt_format="raw")
    edges = [{"source": "START", "target": "a"}, {"source": "a", "target": "END"}]
    made = workflow({"a": {"domain": "news"}}, edges, domains={"news": str(file)})
    with pytest.raises(PromptFormatError, match="trained in prompt format 'raw'"):
        build_graph(made, runtime=fake_runtime).invoke(INPUT)


def test_a_faulty_workflow_made_in_python_is_not_built() -> None:
    with pytest.raises(WorkflowError, match="unknown domain 'news' of agent 'a'"):
        build_graph(workflow({"a": {"domain": "news"}}, [{"source": "START", "target": "a"}]))


def test_neither_import_nor_build_loads_torch_or_a_model(write_workflow: Write) -> None:
    path = write_workflow(ONE.format(keys="", agent="{}").replace("base: fake", "base: smollm2-135m"))
    code = (
        "import sys\nfrom offset_runtime.graphs import make_graph\n"
        f"graph = make_graph({str(path)!r})\nassert list(graph.nodes) == ['__start__', 'a']\n"
        "loaded = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_agents_share_the_base_that_the_section_model_describes() -> None:
    edges = [{"source": "START", "target": "a"}, {"source": "a", "target": "END"}]
    section = {"base": "fake", "backend": "llama_cpp", "llama_cpp": {"n_ctx": 64}}
    made = workflow({"a": {}}, edges, model=section)
    model = chat_model(made, made.agents["a"])
    assert (model.backend, model.llama_cpp) == ("llama_cpp", LlamaCppOptions(n_ctx=64))


def test_the_names_the_package_offers_are_sorted_and_complete() -> None:
    from offset_runtime import graphs

    assert graphs.__all__ == sorted(graphs.__all__)
    assert all(hasattr(graphs, name) for name in graphs.__all__)
    assert load_workflow.__module__.startswith("offset_runtime.graphs")


class _Refusals:
    """Has a runtime's engine refuse the first requests."""

    def __init__(self, runtime: OffsetRuntime, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.asked = 0
        submit = runtime.engine.submit

        def refused(*request: Any) -> Any:
            self.asked += 1
            if self.asked <= count:
                raise QueueFullError("full")
            return submit(*request)

        monkeypatch.setattr(runtime.engine, "submit", refused)


def test_an_agent_that_finds_no_room_is_run_again(
    fake_runtime: OffsetRuntime, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = workflow({"a": {"max_tokens": 2}}, [{"source": "START", "target": "a"}, {"source": "a", "target": "END"}])
    # The chat model asks three times by itself.
    refusals = _Refusals(fake_runtime, monkeypatch, count=3)

    assert [agent for agent, _ in turns(build_graph(made, runtime=fake_runtime))] == ["a"]
    assert refusals.asked == 4


def test_a_workflow_stops_before_an_agent_and_goes_on(fake_runtime: OffsetRuntime, tmp_path: Path) -> None:
    thread: Any = {"configurable": {"thread_id": "t"}}
    with sqlite_checkpoints(tmp_path / "checkpoints.sqlite") as saver:
        graph = build_graph(FORK, checkpointer=saver, runtime=fake_runtime)
        stopped = graph.invoke(INPUT, thread, interrupt_before=["last"])
        assert graph.get_state(thread).next == ("last",)
        agents = [event.agent for event in run_workflow(graph, None, config=thread) if isinstance(event, AgentFinished)]

    assert sorted(str(m.name) for m in stopped["messages"][1:]) == ["first", "left", "right"]
    assert agents == ["last"]
