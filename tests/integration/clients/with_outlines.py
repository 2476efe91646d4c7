"""outlines in front of an endpoint: text, stream, a class as the answer."""

import openai
import outlines
from asked import BASE, MAX_TOKENS, MODEL, PROMPT, tell
from lighthouse import Lighthouse

model = outlines.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), MODEL)
settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
tell("text", model(PROMPT, **settings))
tell("stream", "".join(model.stream(PROMPT, **settings)))
tell("a class", Lighthouse.model_validate_json(model(PROMPT, Lighthouse, **settings)).model_dump_json(), own=True)
