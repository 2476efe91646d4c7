"""A stream of SGLang's /generate gone on with over its death: the next engine is given the prompt and what has been said of the answer.

Each event holds all so far, so the last one is all that has to be kept. Where the prompt was put as token ids, the answer's
ids are put behind them, and nothing is cut into tokens anew; where it was a text, its text is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from appliance.gateway.said import document_in

Json = dict[str, Any]
PATH = "/generate"
NEW_TOKENS = 128
"""SGLang's own limit where a request has none."""
_MORE = ("return_logprob", "return_hidden_states", "image_data", "video_data", "audio_data", "input_embeds", "session_params")
_FORMS = ("json_schema", "regex", "ebnf", "structural_tag")


class Generated:
    """One stream so far: its last whole event."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = b""

    def take(self, events: bytes) -> bytes:
        """Whole events on their way to the client, unchanged."""
        begin = events.rfind(b'data: {"text"')
        if begin >= 0:
            self._last = events[begin:].partition(b"\n\n")[0]
        return events

    def going_on(self, body: bytes) -> GeneratedRest | None:
        """The rest; None where there is no such request."""
        had, document = document_in(self._last), json.loads(body)
        sampling = document.get("sampling_params") or {}
        about = had.get("meta_info") if had is not None else None
        if had is None or not isinstance(about, dict) or not isinstance(sampling, dict) or any(document.get(name) for name in _MORE):
            return None
        if any(sampling.get(name) for name in _FORMS) or sampling.get("n") not in (None, 1):
            return None
        count, most = about.get("completion_tokens"), sampling.get("max_new_tokens") or NEW_TOKENS
        put = _behind(document, had)
        if put is None or not isinstance(count, int) or not isinstance(most, int):
            return None
        left = max(1, most - count) if about.get("finish_reason") is None else 1
        asked = {**document, **put, "sampling_params": {**sampling, "max_new_tokens": left}}
        return GeneratedRest(self, json.dumps(asked, separators=(",", ":")).encode(), had, complete=count >= most)


class GeneratedRest:
    """The next engine's events, each with what the client has in front of it.

    Attributes:
        body: what it is asked.
    """

    __slots__ = ("_about", "_complete", "_generated", "_had", "body")

    def __init__(self, generated: Generated, body: bytes, had: Json, *, complete: bool) -> None:
        """`complete`: it has as many tokens as it may have, and only its end is missing."""
        self.body = body
        self._generated = generated
        self._had = had
        self._about: Json = had["meta_info"]
        self._complete = complete

    def take(self, events: bytes) -> bytes:
        """Whole events."""
        return self._generated.take(b"".join(self._rest(events)))

    def _rest(self, events: bytes) -> Iterator[bytes]:
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            document = document_in(event)
            if document is None or "error" in document:
                if event.strip() and not event.startswith(b":"):
                    yield event + b"\n\n"
            elif self._about.get("finish_reason") is None and isinstance(document.get("meta_info"), dict):
                yield b"data: " + json.dumps(self._whole(document), ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"

    def _whole(self, document: Json) -> Json:
        """One event. Of an answer that is complete it is the first one's again, with the reason."""
        had, about, new = self._had, self._about, document["meta_info"]
        told = {**new, **{name: about[name] for name in ("id", "prompt_tokens") if name in about}}
        if self._complete:
            told |= {
                "completion_tokens": about["completion_tokens"],
                "finish_reason": {"type": "length", "length": about["completion_tokens"]},
            }
            return {**document, "text": had["text"], **_ids(had), "meta_info": told}
        told["completion_tokens"] = about["completion_tokens"] + new.get("completion_tokens", 0)
        ids = {"output_ids": [*had["output_ids"], *document["output_ids"]]} if _ids(had) and _ids(document) else {}
        return {**document, "text": had["text"] + str(document.get("text", "")), **ids, "meta_info": told}


def _behind(document: Json, had: Json) -> Json | None:
    """The prompt, and behind it what has been said."""
    prompt, ids = document.get("text"), document.get("input_ids")
    if isinstance(prompt, str) and isinstance(had.get("text"), str):
        return {"text": prompt + had["text"]}
    if isinstance(ids, list) and ids and all(type(one) is int for one in ids) and _ids(had):
        return {"input_ids": [*ids, *had["output_ids"]]}
    return None


def _ids(document: Json) -> Json:
    found = document.get("output_ids")
    return {"output_ids": found} if isinstance(found, list) else {}
