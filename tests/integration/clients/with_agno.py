"""agno: an agent, whole and streamed."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from asked import BASE, MAX_TOKENS, MODEL, PROMPT, tell

agent = Agent(model=OpenAILike(id=MODEL, api_key="none", base_url=BASE, temperature=0, max_tokens=MAX_TOKENS), telemetry=False)
tell("run", agent.run(PROMPT).content)
tell("stream", "".join(event.content or "" for event in agent.run(PROMPT, stream=True) if event.event == "RunContent"))
