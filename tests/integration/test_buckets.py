"""Length buckets before the real engine: what is padded is met exactly, and answered as the padded prompt itself would be."""

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from appliance.gateway.fitting import longer

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
FUSED, BUCKET = range(121, 128), 128
WORDS = ("river", "bread", "the", "moon", "chess", "and", "trains", "honey", "glass", "winter", "maps", "salt")
SETTINGS = (f"admission.fused_lengths={list(FUSED)}", f"admission.length_buckets=[{BUCKET}]", "admission.length_policy=pad")


def _post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str | None, Any]:
    """Status, what was done with the prompt, document."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    found = answer.status, answer.getheader("x-appliance-prompt"), json.loads(answer.read())
    connection.close()
    return found


def _chat(model: str, words: int) -> dict[str, Any]:
    content = "Say one thing about " + " ".join(WORDS[number % len(WORDS)] for number in range(words))
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}


def test_a_padded_prompt_is_answered_as_it_stands(foreground, demo_model: Path) -> None:
    """Near and far, a fused length ends in the bucket; the answer is that of the body with the line breaks in it, and of no other."""
    run = foreground("--model", str(demo_model), "--port", "0", *(word for setting in SETTINGS for word in ("--set", setting)))
    model, url = run.wait_until_serving()
    lengths: dict[int, dict[str, Any]] = {}
    for words in range(75, 160):
        body = _chat(model, words)
        count = _post(url, "/tokenize", {"model": model, "messages": body["messages"]})[2]["count"]
        lengths.setdefault(count, body)
        if count > BUCKET:
            break
    met = [tokens for tokens in FUSED if tokens in lengths]
    assert len(met) >= 5, sorted(lengths)
    for tokens in met[::3]:
        status, altered, padded = _post(url, CHAT, lengths[tokens])
        assert (status, altered, padded["usage"]["prompt_tokens"]) == (200, "padded", BUCKET), (tokens, padded)
        tried = longer(CHAT, lengths[tokens], BUCKET - tokens)
        by_hand = next(one for one in tried if _post(url, "/tokenize", {"model": model, "messages": one["messages"]})[2]["count"] == BUCKET)
        status, altered, same = _post(url, CHAT, by_hand)
        assert (status, altered, same["choices"]) == (200, None, padded["choices"])
    near = next(tokens for tokens in (BUCKET, FUSED[0] - 1, BUCKET + 1) if tokens in lengths)
    status, altered, left = _post(url, CHAT, lengths[near])
    assert (status, altered, left["usage"]["prompt_tokens"]) == (200, None, near)
    assert run.stop() == 0
