"""The ollama package speaks another protocol: it is told so in words, not with a riddle."""

import ollama
from asked import MESSAGES, MODEL, URL, tell

client = ollama.Client(host=URL)
for how, ask in (("chat", lambda: client.chat(model=MODEL, messages=MESSAGES)), ("list", client.list)):
    try:
        ask()
    except ollama.ResponseError as error:
        assert error.status_code == 404, error
        assert "/api/" in str(error), error
        tell(f"{how} is refused", str(error), own=True)
    else:
        raise AssertionError("an answer")
