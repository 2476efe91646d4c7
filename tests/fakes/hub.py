"""A hub of one model, by the few requests that huggingface_hub makes to fetch it; it hangs up and refuses on command."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

COMMIT = "5e1f" * 10


@dataclass
class Hub:
    """`with Hub(...) as hub`: serves on loopback. What it is told may change as it runs.

    Attributes:
        files: name → content; those that are larger than `cut_at` can be cut.
        token: what it wants to see; empty: anybody may.
        cuts: so many answers with a large file end after `cut_at` bytes.
        refusals: so many requests behind the first cut are 403.
        ranges: what was asked of large files: "" or a Range header.
    """

    repo: str
    files: Mapping[str, bytes]
    token: str = ""
    cut_at: int = 10_000
    cuts: int = 0
    refusals: int = 0
    ranges: list[str] = field(default_factory=list)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        """One request."""
        path = asked.path.partition("?")[0]
        if (self.token and asked.headers.get("Authorization") != f"Bearer {self.token}") or self.repo not in path:
            _send(asked, 401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"})
        elif path.startswith("/api/models/"):
            revision = path.removeprefix(f"/api/models/{self.repo}").removeprefix("/revision/")
            if revision not in ("", "main", COMMIT):
                _send(asked, 404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
                return
            siblings = [{"rfilename": name, "size": len(content), "blobId": "0"} for name, content in self.files.items()]
            _send(asked, 200, json.dumps({"id": self.repo, "modelId": self.repo, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._send_file(asked, self.files[path.rpartition("/")[2]])

    def _send_file(self, asked: http.server.BaseHTTPRequestHandler, content: bytes) -> None:
        facts = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if asked.command == "HEAD" or len(content) <= self.cut_at:
            _send(asked, 200, content, facts)
            return
        wanted = asked.headers.get("Range", "")
        self.ranges.append(wanted)
        if len(self.ranges) > 1 and self.refusals:
            self.refusals -= 1
            _send(asked, 403, b"{}")
            return
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        end = len(content)
        if self.cuts:
            self.cuts -= 1
            end = begin + self.cut_at
        if wanted:
            facts["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        _send(asked, 206 if wanted else 200, content[begin:], facts, end - begin)


def _send(
    asked: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] | None = None, only: int | None = None
) -> None:
    asked.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
        asked.send_header(name, value)
    asked.end_headers()
    if asked.command == "GET":
        asked.wfile.write(body[:only])
    if only is not None and only < len(body):
        asked.close_connection = True
