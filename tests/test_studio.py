"""`langgraph dev` on examples/studio, over loopback, as LangGraph Studio uses it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

ROOT = Path(__file__).parents[1]
PATIENCE_S = 180
INPUT = {"messages": [{"role": "user", "content": "A bridge was opened in the harbour town today."}]}

pytestmark = pytest.mark.slow

# Which workflow is served is the run's choice.
FACTORY = """
from pathlib import Path

from langchain_core.runnables import RunnableConfig
from offset_runtime.graphs import make_graph


def graph(config: RunnableConfig):
    name = config.get("configurable", {}).get("workflow", "short")
    return make_graph(Path(__file__).with_name(f"{name}.yaml"))
"""
WORKFLOW = """
version: 1
name: one agent
model: {base: fake}
agents:
  AGENT: {system_prompt: Answer., max_tokens: 5}
edges:
  - {source: START, target: AGENT}
  - {source: AGENT, target: END}
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the example, on a copy of it: the server writes beside its configuration."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("studio", "newsroom"):
        shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns(".langgraph_api"))
    # On torch, where loading takes seconds: a loop that waited for it would be noticed.
    workflow = folder / "studio" / "workflow.yaml"
    workflow.write_text(workflow.read_text().replace("base: smollm2-135m", "base: smollm2-135m, backend: torch"))
    with serving(folder / "studio") as address:
        yield address


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `langgraph dev` on `folder`; shows the end of its log when that or the test fails."""
    port = free_port()
    # Blocking calls on the server's loop are errors to it: --allow-blocking is not given.
    command = [sys.executable, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload", "--port", str(port)]
    quiet = {"LANGSMITH_TRACING": "false", "LANGGRAPH_CLI_NO_ANALYTICS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **quiet}, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(log.read_text(errors="replace")[-5000:])


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{address}/ok").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the server did not come up:\n{log.read_text(errors='replace')[-5000:]}")


@pytest.mark.real_model
async def test_the_loop_answers_while_the_model_loads_and_tokens_come_with_agent_and_domain(server: str) -> None:
    streamed: dict[tuple[str, str], str] = defaultdict(str)

    async def run(client: LangGraphClient, thread: str) -> None:
        async for part in client.runs.stream(thread, "newsroom", input=INPUT, stream_mode="messages-tuple"):
            assert part.event != "error", part.data
            if part.event == "messages":
                message, metadata = part.data
                streamed[metadata["agent"], metadata["domain"]] += message["content"]

    answered = 0
    async with get_client(url=server) as client, httpx.AsyncClient() as http, asyncio.timeout(PATIENCE_S):
        [assistant] = await client.assistants.search()
        thread = (await client.threads.create())["thread_id"]
        running = asyncio.create_task(run(client, thread))
        while not streamed and not running.done():
            assert (await http.get(f"{server}/ok", timeout=1)).is_success
            answered += 1
            await asyncio.sleep(0.02)
        await running
        state = await client.threads.get_state(thread)

    assert assistant["graph_id"] == "newsroom"
    assert answered > 5
    assert list(streamed) == [("reporter", "news"), ("speaker", "speech")]
    replies = state["values"]["messages"][1:]
    assert [reply["name"] for reply in replies] == ["reporter", "speaker"]
    assert [reply["content"] for reply in replies] == list(streamed.values())


@pytest.mark.real_model
async def test_a_run_to_its_end_gives_the_messages_with_their_provenance(server: str) -> None:
    async with get_client(url=server) as client, asyncio.timeout(PATIENCE_S):
        state = await client.runs.wait(None, "newsroom", input=INPUT)

    assert [reply["response_metadata"]["domain"] for reply in state["messages"][1:]] == ["news", "speech"]


async def test_a_function_that_makes_the_graph_is_called_with_the_configuration_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(FACTORY)
    (tmp_path / "langgraph.json").write_text('{"dependencies": ["."], "graphs": {"any": "./graph.py:graph"}}')
    for name, agent in {"short": "clerk", "long": "poet"}.items():
        (tmp_path / f"{name}.yaml").write_text(WORKFLOW.replace("AGENT", agent))

    with serving(tmp_path) as address:
        async with get_client(url=address) as client, asyncio.timeout(PATIENCE_S):
            usual = await client.runs.wait(None, "any", input=INPUT)
            other = await client.runs.wait(None, "any", input=INPUT, config={"configurable": {"workflow": "long"}})

    assert [usual["messages"][-1]["name"], other["messages"][-1]["name"]] == ["clerk", "poet"]
