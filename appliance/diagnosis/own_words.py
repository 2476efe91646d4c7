"""An engine's own words: a line without what a client put into it.

A prompt or a path in a log must neither look like a fault to a person's `diagnose` nor make the supervisor kill the engine:
anybody may send a prompt that says "Fatal Python error".
"""

from __future__ import annotations

import re

_MARKS = ("HTTP/", "request", "Request", "prompt", "Req(", "ReqInput", "| GET", "| POST", "| HEAD", "| DELETE", "| PUT")
_REQUEST_LINE = re.compile(
    r"(?<=[\"\s])((?:GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) )[^\"\n]{1,4000}?(?= HTTP/\d|\"|\s\d{1,3}(?:\.\d{1,3}){3} \d{3})"
)
_GIN_PATH = re.compile(r"(\| (?:GET|POST|PUT|PATCH|DELETE|HEAD)\s+)\"[^\"]*\"")
_REQUEST_BODY = re.compile(
    r"(Received request [^\s:]{1,200}: |Receive(?:d)?: obj=\w{1,40}\(|GenerateReqInput\(|(?:Chat)?CompletionRequest\(|\bReq\(|"
    r"[Rr]equest body: |\bprompt: ['\"]|\"prompt\": ?\"|\"messages\": ?\[).*",
    re.DOTALL,
)


def own_words(line: str) -> str:
    """The line with request paths and bodies taken out; other lines as they are."""
    if not any(mark in line for mark in _MARKS):
        return line
    line = _REQUEST_BODY.sub(lambda match: f"{match[1]}...", line)
    line = _GIN_PATH.sub(lambda match: f'{match[1]}"..."', line)
    return _REQUEST_LINE.sub(lambda match: f"{match[1]}...", line)
