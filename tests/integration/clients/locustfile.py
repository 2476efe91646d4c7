"""locust: four users who stream chats; what ends without [DONE] counts as failed."""

import os

from locust import HttpUser, task

BODY = {
    "model": os.environ["ASKED_MODEL"],
    "messages": [{"role": "user", "content": os.environ["ASKED_PROMPT"]}],
    "max_tokens": int(os.environ["ASKED_TOKENS"]),
    "temperature": 0,
    "stream": True,
}


class Reader(HttpUser):
    """One after the other."""

    @task
    def chat(self) -> None:
        """A stream to its end."""
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith(b"data: ")]
            if answer.status_code != 200 or not lines or lines[-1] != b"data: [DONE]":
                answer.failure(f"{answer.status_code}, {lines[-1:]}")
