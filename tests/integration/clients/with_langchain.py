"""langchain-openai: invoke, stream, batch."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=max_tokens, max_retries=0)


def tell(how: str, text: str, **more: object) -> None:
    """A line that the caller reads."""
    print(json.dumps({"how": how, "text": text, **more}), flush=True)


whole = chat.invoke(prompt)
tell("invoke", whole.content, usage=whole.usage_metadata["total_tokens"], finish=whole.response_metadata["finish_reason"])
tell("stream", "".join(piece.content for piece in chat.stream(prompt)))
for answer in chat.batch([prompt, prompt]):
    tell("batch", answer.content)
