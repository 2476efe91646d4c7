"""The address of appliance.toml as systemd reads it."""

from dataclasses import replace

import pytest

from appliance.config.schema import Config, GatewayTable
from appliance.core.errors import ApplianceError
from appliance.socket_drop_in import drop_in


def _drop_in(**keys: object) -> str | None:
    return drop_in(Config(gateway=replace(GatewayTable(), **keys)))


def test_the_default_needs_none() -> None:
    """The unit says the same."""
    assert _drop_in() is None


@pytest.mark.parametrize(
    ("host", "port", "line"),
    [
        ("127.0.0.1", 8080, "ListenStream=127.0.0.1:8080"),
        ("localhost", 8080, "ListenStream=127.0.0.1:8080"),
        ("::", 8000, "ListenStream=[::]:8000"),
        ("192.0.2.7", 8000, "ListenStream=192.0.2.7:8000"),
    ],
)
def test_another_address_replaces_it(host: str, port: int, line: str) -> None:
    """The empty assignment comes first: without it systemd would listen on both."""
    text = _drop_in(host=host, port=port)
    assert text is not None
    lines = text.splitlines()
    assert lines.index("ListenStream=") < lines.index(line)


@pytest.mark.parametrize(("host", "port", "words"), [("box.example", 8000, "resolves no names"), ("127.0.0.1", 0, "port = 0")])
def test_what_systemd_cannot_hold_is_told(host: str, port: int, words: str) -> None:
    """And the socket keeps its default."""
    with pytest.raises(ApplianceError, match=words):
        _drop_in(host=host, port=port)
