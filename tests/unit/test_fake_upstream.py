"""The upstream that gateways are measured with reads requests as other gateways send them."""

from __future__ import annotations

import pytest

from tests.fakes.upstream import split_body

LONG, CHUNKED = b"post / http/1.1\r\ncontent-length: 5", b"post / http/1.1\r\ntransfer-encoding: chunked\r\nhost: x"


@pytest.mark.parametrize(
    ("head", "data", "found"),
    [
        (LONG, b"12345GET", (b"12345", b"GET")),
        (LONG, b"1234", None),
        (b"get / http/1.1", b"GET", (b"", b"GET")),
        (CHUNKED, b"3\r\n123\r\n2;x=y\r\n45\r\n0\r\n\r\nGET", (b"12345", b"GET")),
        (CHUNKED, b"3\r\n123\r\n0\r\n", None),
        (CHUNKED, b"3\r\n12", None),
        (CHUNKED, b"", None),
    ],
)
def test_a_body_has_a_length_or_comes_in_chunks(head: bytes, data: bytes, found: tuple[bytes, bytes] | None) -> None:
    """Clients on httpx stream what they pass on in chunks; what is not all there is waited for."""
    assert split_body(head, data) == found
