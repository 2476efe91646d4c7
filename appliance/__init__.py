"""An OpenAI-compatible LLM endpoint that does not fall over. docs/structures.md is the map."""

__version__ = "0.1.0"
