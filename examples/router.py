"""Send each message to the agent of the domain that finds it likeliest, and to an editor where that is unclear.

    python examples/router.py

No model is asked and no token generated to decide: the message is scored under the offset of every domain, in one
batch. The scores stay in the graph's state. Below a lead of `--margin` the router is unsure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from langgraph.graph import END, START, StateGraph

from offset_runtime.agents import ChatOffset, DomainRouter, RoutedState, agent_node

STORE = Path(__file__).parent / "newsroom" / "offsets"
DOMAINS = ["news", "speech", "computing"]
MESSAGES = [
    "Police say two men have been arrested in Sydney after a robbery on Tuesday night.",
    "I ask the Congress to act. The people of this great nation have never feared the future.",
    "A program which reads the source code of another program and translates it to machine code. Compare interpreter.",
    "Thanks, see you later.",
]


def build(model: ChatOffset, margin: float) -> Any:
    router = DomainRouter(model, DOMAINS, margin=margin)
    graph = StateGraph(RoutedState)
    for domain in DOMAINS:
        graph.add_node(domain, agent_node(domain, model.for_domain(domain), system_prompt="Continue this text."))
    graph.add_node("editor", agent_node("editor", model, system_prompt="Answer in one short sentence."))
    targets = {**{domain: domain for domain in DOMAINS}, "*": "editor"}
    graph.add_node("desk", router.node("desk", targets), destinations=tuple(targets.values()))
    graph.add_edge(START, "desk")
    for name in targets.values():
        graph.add_edge(name, END)
    return graph.compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--margin", type=float, default=0.05, help="nats a token")
    parser.add_argument("messages", nargs="*", default=MESSAGES)
    given = parser.parse_args()
    graph = build(ChatOffset(model=given.model, store=STORE, max_tokens=20), given.margin)

    for message in given.messages:
        state = graph.invoke({"messages": [("user", message)]})
        found, reply = state["routes"]["desk"], state["messages"][-1]
        scores = ", ".join(f"{domain} {score:+.2f}" for domain, score in found["scores"].items())
        print(f"{message}\n  {found['route'] or 'unsure'} ({scores})")
        print(f"  {reply.name}: {' '.join(reply.text.split())}\n")


if __name__ == "__main__":
    main()
