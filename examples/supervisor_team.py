"""A supervisor that sends work to agents in domains of their own, until it says that it is done.

    python examples/supervisor_team.py

The supervisor's choice is structured output: it can only name an agent that has not spoken yet, or FINISH, however
small the base. With a base that was trained on tools, LangGraph's own `create_supervisor` works as well: give it
`create_agent(model.for_domain("news"), name="reporter")` and the like as agents.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import create_model

from offset_runtime.agents import ChatOffset, agent_node

STORE = Path(__file__).parent / "newsroom" / "offsets"
DOMAINS = {"reporter": "news", "speaker": "speech", "engineer": "computing"}
TASKS = {
    "reporter": "Write the lead paragraph of a news report on it.",
    "speaker": "Write a short speech about it.",
    "engineer": "Explain the technology behind it.",
}


def supervisor(model: ChatOffset) -> Any:
    """The node that says who is next."""

    def choose(state: MessagesState) -> Command[Literal["reporter", "speaker", "engineer", "__end__"]]:
        spoken = {message.name for message in state["messages"]}
        left = [name for name in TASKS if name not in spoken]
        choices = (*left, "FINISH") if spoken - {None} else tuple(left)
        form = create_model("Choice", next=(Literal[choices], ...))
        team = "\n".join(f"{name}: {TASKS[name]}" for name in left)
        prompt = f"You lead a team. Name who works next, or FINISH when the request is fulfilled.\n{team}"
        found = model.with_structured_output(form).invoke([("system", prompt), *state["messages"]])
        print(f"supervisor -> {found.next}")
        return Command(goto="__end__" if found.next == "FINISH" else found.next)

    return choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", nargs="?", default="A bridge was finished in the harbour town. Report on it.")
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    model = ChatOffset(model=given.model, store=STORE, max_tokens=60)

    graph = StateGraph(MessagesState)
    graph.add_node("supervisor", supervisor(model))
    graph.add_edge(START, "supervisor")
    for name, domain in DOMAINS.items():
        speaker = model.for_domain(domain)
        # All agents read one transcript, whose state they share.
        graph.add_node(name, agent_node(name, speaker, system_prompt=TASKS[name], history="shared"))
        graph.add_edge(name, "supervisor")

    for message in graph.compile().invoke({"messages": [("user", given.request)]})["messages"][1:]:
        print(f"\n{message.name} [{message.response_metadata['domain']}]: {message.text}")


if __name__ == "__main__":
    main()
