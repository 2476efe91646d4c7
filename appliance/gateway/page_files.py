"""The page's files: read once from the package, served as they are, under a policy that lets nothing else in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from appliance.gateway.headers import Headers, value_of

FRONT = "/"
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No inline script, no inline style, nobody else's frame: a text that got in where it should not be stays text."""
_SAFE: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]
Answer = tuple[int, Headers, bytes]


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    content_type: bytes
    body: bytes
    tag: bytes

    def answer(self, request: Headers) -> Answer:
        """Whole, or 304 where the browser has this very one."""
        headers: Headers = [*_SAFE, (b"etag", self.tag)]
        if value_of(request, b"if-none-match") == self.tag:
            return 304, headers, b""
        return 200, [(b"content-type", self.content_type), *headers], self.body


def wants_page(request: Headers) -> bool:
    """A browser asks for HTML; curl takes anything, and gets a few words."""
    return b"text/html" in (value_of(request, b"accept") or b"")


def _read(folder: Traversable, path: str) -> dict[str, PageFile]:
    found: dict[str, PageFile] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{path}{entry.name}/")
        elif (kind := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            body = entry.read_bytes()
            tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:20].encode()
            found[f"{path}{entry.name}"] = PageFile(kind, body, tag)
    return found


_found = _read(resources.files("appliance.gateway") / "page", "/page/")
FILES = {FRONT: _found.pop("/page/index.html"), **_found}
"""Path → file. The page itself stands at /."""
