"""strands-agents: an agent without tools. An answer that ends at its length is an error to it: this one ends with a sentence."""

from asked import BASE, MAX_TOKENS, MODEL, PROMPT, tell
from strands import Agent
from strands.models.openai import OpenAIModel

settings = {"temperature": 0, "max_tokens": 2 * MAX_TOKENS, "stop": ["."]}
model = OpenAIModel(client_args={"api_key": "none", "base_url": BASE, "max_retries": 0}, model_id=MODEL, params=settings)
tell("agent", str(Agent(model=model, callback_handler=None)(PROMPT)), own=True)
