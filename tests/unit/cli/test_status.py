"""`appliancectl status`: what the box's gateway holds back or refuses stands beside applianced's own word."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from appliance.cli.gateway_says import restrictions_at
from appliance.cli.place import Place
from tests.unit.cli.conftest import Applianced, Ctl

SAID = ["card 0000:01:00.0 has 99.0 % of its 24.00 GiB taken", "prompts of exactly 513 tokens are refused, because engines died of them"]
FOUND = {"tokens": 513, "why": "3 of 3 crashes of the last day met a prompt of 513 tokens"}


@contextmanager
def gateway_that_says(status: int, body: bytes) -> Iterator[int]:
    """Its port; for each path the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_the_gateway_holds_back_or_refuses_is_shown(
    ctl: Ctl, applianced: Applianced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the box's own appliance, as words and as data; what diagnosis found is then said once, by the gateway."""
    monkeypatch.setattr(Place, "means_the_box", lambda _: True)
    applianced.answers["status"] = {"state": "serving", "generation": 1, "sentence": "serving", "subscribers": 1, "fused_lengths": [FOUND]}
    with gateway_that_says(200, json.dumps({"restrictions": SAID}).encode()) as port:
        config = tmp_path / "appliance.toml"
        config.write_text(f"[gateway]\nport = {port}\n")
        arguments = ("--run-dir", applianced.run_dir, "--config", config, "status")
        words, data = ctl(*arguments), ctl(*arguments, "--json")
        applianced.answers["status"] |= {"subscribers": 0}
        asleep = ctl(*arguments, "--json")
    assert "admission" in words.out
    assert "; ".join(SAID) in " ".join(words.out.split())
    assert "lengths of crashes" not in words.out
    assert json.loads(data.out)["restrictions"] == SAID
    assert "restrictions" not in json.loads(asleep.out), "a gateway that does not run was asked, which starts it"


def test_without_the_gateways_word_there_are_the_lengths_that_diagnosis_found(ctl: Ctl, applianced: Applianced) -> None:
    """And no line where there are none."""
    answer = {"state": "serving", "generation": 1, "sentence": "serving"}
    applianced.answers["status"] = answer
    assert "lengths of crashes" not in ctl("--run-dir", applianced.run_dir, "status").out
    applianced.answers["status"] = answer | {"fused_lengths": [FOUND]}
    said = ctl("--run-dir", applianced.run_dir, "status")
    assert FOUND["why"] in " ".join(said.out.split())
    assert "admission" not in said.out


@pytest.mark.parametrize(
    ("status", "body"), [(401, b'{"error": {}}'), (200, b"no JSON"), (200, b"[]"), (200, b'{"restrictions": 7}'), (200, b"{}")]
)
def test_a_gateway_that_does_not_say_it_is_passed_over(status: int, body: bytes) -> None:
    """It wants a key, is of another version, or is something else."""
    with gateway_that_says(status, body) as port:
        assert restrictions_at(f"http://127.0.0.1:{port}") == []
    assert restrictions_at(f"http://127.0.0.1:{port}") == [], "nobody listens there any more"
