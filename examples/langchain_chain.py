"""Plug a domain into an existing LangChain chain.

    python examples/langchain_chain.py

The chain is prompt | model | parser, as with any chat model. The same chain then runs in two domains at once on one
loaded base: a domain is an argument, of the model or of a call.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel

from offset_runtime.agents import ChatOffset

STORE = Path(__file__).parent / "newsroom" / "offsets"
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You write one or two sentences."), ("user", "Write about {topic}.")]
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--topic", default="a bridge that was opened in the harbour town today")
    given = parser.parse_args()

    # Was: model = ChatOllama(model="…")
    model = ChatOffset(model=given.model, store=STORE, max_tokens=50, repetition_penalty=1.1)

    chain = PROMPT | model.for_domain("news") | StrOutputParser()
    print("news, as it comes: ", end="")
    for text in chain.stream({"topic": given.topic}):
        print(text, end="", flush=True)
    print()

    both = RunnableParallel({name: PROMPT | model.for_domain(name) for name in ("speech", "computing")})
    for domain, reply in both.invoke({"topic": given.topic}).items():
        told = reply.response_metadata
        print(f"\n{domain} (offset {told['offset_digest'][:8]}, {reply.usage_metadata['output_tokens']} tokens):")
        print(reply.text)


if __name__ == "__main__":
    main()
