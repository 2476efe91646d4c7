"""What systemd is told of appliance.toml."""

from dataclasses import replace

import pytest

from appliance.config.client_tables import GatewayTable
from appliance.config.schema import Config, SupervisorTable
from appliance.core.errors import ApplianceError
from appliance.unit_drop_ins import drop_ins

SOCKET = "llm-appliance-gateway.socket"


def _of_gateway(**keys: object) -> dict[str, str]:
    return dict(drop_ins(Config(gateway=replace(GatewayTable(), **keys))))


def test_the_defaults_need_none() -> None:
    """The units say the same."""
    assert dict(drop_ins(Config())) == {}


@pytest.mark.parametrize(
    ("host", "port", "line"),
    [
        ("127.0.0.1", 8080, "ListenStream=127.0.0.1:8080"),
        ("localhost", 8080, "ListenStream=127.0.0.1:8080"),
        ("::", 8000, "ListenStream=[::]:8000"),
        ("192.0.2.7", 8000, "ListenStream=192.0.2.7:8000"),
    ],
)
def test_another_address_replaces_the_units(host: str, port: int, line: str) -> None:
    """The empty assignment comes first: without it systemd would listen on both."""
    lines = _of_gateway(host=host, port=port)[SOCKET].splitlines()
    assert lines.index("ListenStream=") < lines.index(line)


@pytest.mark.parametrize(("host", "port", "words"), [("box.example", 8000, "resolves no names"), ("127.0.0.1", 0, "port = 0")])
def test_what_systemd_cannot_hold_is_told(host: str, port: int, words: str) -> None:
    """And the socket keeps its default."""
    with pytest.raises(ApplianceError, match=words):
        _of_gateway(host=host, port=port)


def test_systemd_waits_for_longer_drains() -> None:
    """Both services; a shorter drain needs nothing, as the service ends by itself."""
    assert "TimeoutStopSec=315\n" in _of_gateway(drain_s=300.0)["llm-appliance-gateway.service"]
    assert _of_gateway(drain_s=5.0) == {}
    config = Config(supervisor=replace(SupervisorTable(), stop_deadline_s=600.0))
    assert "TimeoutStopSec=630\n" in dict(drop_ins(config))["llm-appliance.service"]
