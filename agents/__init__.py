"""LangChain chat model and LLM, and agents with a domain."""
