"""Listening sockets, and what is said of addresses that cannot be had."""

import os
import socket

import pytest

from appliance.core.errors import ApplianceError
from appliance.listening import open_listener, refuse_open, url_of


def test_port_0_takes_a_free_one_and_clients_can_connect() -> None:
    """The URL is the one that works."""
    with open_listener("127.0.0.1", 0) as listener:
        url = url_of(listener)
        port = int(url.rpartition(":")[2])
        assert url == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.parametrize(
    ("host", "start"), [("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:"), ("::", "http://[::1]:"), ("localhost", "http://")]
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, start: str) -> None:
    """Nobody connects to 0.0.0.0; IPv6 needs brackets."""
    with open_listener(host, 0) as listener:
        assert url_of(listener).startswith(start)


def test_a_taken_port_is_refused_with_its_holder() -> None:
    """By name and pid: this very process."""
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ApplianceError) as caught:
            open_listener("127.0.0.1", port)
    assert caught.value.message.startswith(f"port {port} on 127.0.0.1 is taken by ")
    assert f"(pid {os.getpid()})" in caught.value.message
    assert "gateway.port" in str(caught.value.hint)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "256.0.0.1", "x" * 300])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    """With the key to change."""
    with pytest.raises(ApplianceError, match=r"gateway\.host"):
        open_listener(host, 0)


def test_an_address_of_another_machine_is_refused() -> None:
    """192.0.2.0/24 is for documentation: nobody has it."""
    with pytest.raises(ApplianceError, match=r"192\.0\.2\.1.*gateway\.host"):
        open_listener("192.0.2.1", 0)


def test_a_port_can_be_taken_again_right_after_a_connection_was_served() -> None:
    """A restart does not wait for TIME_WAIT."""
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        served, _ = listener.accept()
        served.close()  # our side closes first: TIME_WAIT is ours
        client.close()
    open_listener("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_leave(host: str) -> None:
    """There are no API keys: nobody serves the network by accident."""
    with open_listener(host, 0) as listener:
        with pytest.raises(ApplianceError, match=r"open to other machines.*allow_open"):
            refuse_open([listener], allowed=False)
        refuse_open([listener], allowed=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    """It is the default."""
    with open_listener(host, 0) as listener:
        refuse_open([listener], allowed=False)
