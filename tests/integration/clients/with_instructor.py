"""instructor: a class as the answer, by a tool and by a schema."""

import instructor
import openai
from asked import BASE, FORM_TOKENS, MESSAGES, MODEL, tell
from lighthouse import Lighthouse

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=MODEL, response_model=Lighthouse, messages=MESSAGES, max_tokens=FORM_TOKENS, temperature=0, max_retries=1
    )
    tell(mode.value, found.model_dump_json(), own=True)
