"""Workflows of agents, declared in YAML and run as LangGraph graphs."""
