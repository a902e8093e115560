"""Add domains to a LangGraph graph that is there already, in five changed lines.

    python examples/existing_graph.py

The lines are marked with `# changed`, each with what stood there before. Nodes, state, edges and streaming stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langgraph.graph import END, START, MessagesState, StateGraph

from offset_runtime.agents import ChatOffset  # changed: from langchain_ollama import ChatOllama

STORE = Path(__file__).parent / "newsroom" / "offsets"


def build(name: str):
    model = ChatOffset(model=name, store=STORE, max_tokens=40)  # changed: model = ChatOllama(model=name)
    news = model.for_domain("news")  # changed: news = model
    speech = model.for_domain("speech")  # changed: speech = model

    def report(state: MessagesState) -> dict:
        return {"messages": [news.invoke([("system", "Write the lead paragraph."), *state["messages"]])]}

    def speak(state: MessagesState) -> dict:
        text = state["messages"][-1].text
        return {"messages": [speech.invoke([("system", "Turn it into a speech."), ("user", text)])]}

    graph = StateGraph(MessagesState)
    graph.add_node("report", report)
    graph.add_node("speak", speak)
    graph.add_edge(START, "report")
    graph.add_edge("report", "speak")
    graph.add_edge("speak", END)
    return graph.compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    asked = {"messages": [("user", "A bridge was opened in the harbour town today.")]}

    node = None
    for chunk, metadata in build(given.model).stream(asked, stream_mode="messages"):
        if metadata["langgraph_node"] != node:
            node = metadata["langgraph_node"]
            print(f"\n\n{node} [{metadata['domain']}]: ", end="")  # changed: print(f"\n\n{node}: ", end="")
        print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
