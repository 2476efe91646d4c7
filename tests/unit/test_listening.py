"""Listening sockets: opened, taken over, refused."""

from __future__ import annotations

import os
import socket

import pytest

from appliance.core.errors import ApplianceError
from appliance.listening import adopt_listener, is_open_to_others, open_listener, passed_listeners, url_of


def test_port_zero_is_chosen_by_the_kernel_and_told() -> None:
    """The address that a client on this machine connects to."""
    with open_listener("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not is_open_to_others(listener)


def test_every_address_is_open_to_others_and_reached_by_loopback() -> None:
    """0.0.0.0."""
    with open_listener("0.0.0.0", 0) as listener:
        assert is_open_to_others(listener)
        assert url_of(listener).startswith("http://127.0.0.1:")
        assert url_of(listener, as_bound=True).startswith("http://0.0.0.0:")


def test_a_port_that_is_taken_names_its_holder() -> None:
    """This very process."""
    with open_listener("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ApplianceError, match=rf"port {port} on 127\.0\.0\.1 is taken by .*\(pid {os.getpid()}\)"):
            open_listener("127.0.0.1", port)


def test_a_descriptor_that_does_not_listen_is_refused_and_left_open() -> None:
    """It is not ours to close."""
    with socket.socket() as idle:
        with pytest.raises(ApplianceError, match="does not listen"):
            adopt_listener(idle.fileno())
        assert os.fstat(idle.fileno())


def test_sockets_for_another_process_are_not_ours() -> None:
    """LISTEN_PID decides; a count that is no number is an error."""
    assert passed_listeners({}, 1) == []
    assert passed_listeners({"LISTEN_PID": "2", "LISTEN_FDS": "1"}, 1) == []
    with pytest.raises(ApplianceError, match="LISTEN_FDS is 'x'"):
        passed_listeners({"LISTEN_PID": "1", "LISTEN_FDS": "x"}, 1)
