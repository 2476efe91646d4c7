"""An engine's own words: a line without what a client put into it, without the echo of source code, and without what our own
supervisor quotes: in the journal its sentences stand between the engine's lines, and name the evidence that they stand on.

A prompt or a path in a log must neither look like a fault to a person's `diagnose` nor make the supervisor kill the engine:
anybody may send a prompt that says "Fatal Python error". The same goes for answers, and for commands that look for such words (sudo, cron).
"""

from __future__ import annotations

import re

_OURS = ("(evidence ", " confidence=")
_MARKS = (
    "HTTP/", "request", "Request", "prompt", "inputs=", "Req(", "ReqInput", "| GET", "| POST", "| HEAD", "| DELETE", "| PUT",
    "  raise ", "Generated response ", "Parsed message: ", "COMMAND=", " CMD (", "grep ", '"content":', *_OURS,
)  # fmt: skip
_REQUEST_LINE = re.compile(
    r"(?<=[\"\s])((?:GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) )[^\"\n]{1,4000}?(?= HTTP/\d|\"|\s\d{1,3}(?:\.\d{1,3}){3} \d{3})"
)
_GIN_PATH = re.compile(r"(\| (?:GET|POST|PUT|PATCH|DELETE|HEAD)\s+)\"[^\"]*\"")
_BODY = (
    r"(Received request [^\s:]{1,200}: |Receive(?:d)?: obj=\w{1,40}\(|GenerateReqInput\(|(?:Chat)?CompletionRequest\(|\bReq\(|"
    r"[Rr]equest body: |\bprompt: ['\"]|\b(?:prompt|inputs)=\\?['\"]|\"prompt\": ?\"|\"messages\": ?\[|\"content\": ?\"|Parsed message: |"
    r"Generated response \S{1,200}(?: \([^)]{1,40}\))?: output: |\bCOMMAND=|\) CMD \(|(?:^|[$#+>|] )(?:sudo )?[zef]?grep ).*"
)
_REQUEST_BODY = re.compile(_BODY, re.DOTALL)
_REQUEST_BODIES = re.compile(_BODY.encode())
_RAISE = re.compile(r"(\s{3}raise )[\w.]{1,80}\(.*", re.DOTALL)
"""A traceback's quotation of the statement that raises: the sentence itself comes two lines later, with its numbers."""
_REASON = re.compile(r"( because ).{1,4000}?\(evidence [a-z_]{2,20}(?: line \d+)?: .*", re.DOTALL)
_VERDICT = re.compile(r".*( cause=[a-z_]{2,40} confidence=(?:high|medium|low)\b)", re.DOTALL)
"""applianced's "did X because Y (evidence Z)", and its verdict: what they tell of has been said before, where it happened."""


def before_body(line: bytes) -> bytes:
    """The line up to the request body in it, quickly; `own_words` takes out the same and more."""
    if (
        b"Re" not in line
        and b"eceive" not in line
        and b"rompt" not in line
        and b"messages" not in line
        and b"body" not in line
        and b"Generated" not in line
    ):
        return line  # one test for each wording, written out: every line of a log comes by here
    match = _REQUEST_BODIES.search(line)
    return line if match is None else line[: match.end(1)]


def own_words(line: str) -> str:
    """The line with request paths and bodies, a quoted `raise` and quoted evidence taken out; other lines as they are."""
    if not any(mark in line for mark in _MARKS):
        return line
    if any(mark in line for mark in _OURS):  # without the mark, the head of a pattern like these is tried at each letter of each line
        line = _REASON.sub(lambda match: f"{match[1]}...", line)
        line = _VERDICT.sub(lambda match: f"...{match[1]}", line)
    line = _RAISE.sub(lambda match: f"{match[1]}...", line)
    line = _REQUEST_BODY.sub(lambda match: f"{match[1]}...", line)
    line = _GIN_PATH.sub(lambda match: f'{match[1]}"..."', line)
    return _REQUEST_LINE.sub(lambda match: f"{match[1]}...", line)
