"""`python -m appliance.gateway`: the HTTP face as a process of its own.

Exit codes: 0 stopped on request; 1 it cannot listen (port taken, address of another machine, open to others without
leave) or its configuration is wrong; 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.config import Config, load_config, parse_overrides
from appliance.config.load import DEFAULT_PATH
from appliance.core.errors import ApplianceError
from appliance.gateway.files import Files, read_files
from appliance.gateway.server import Server
from appliance.listening import adopt_listener, is_open_to_others, open_listener, passed_listeners, refuse_open

log = logging.getLogger("gateway")

RUN_DIR = Path("/run/llm-appliance")
STATE_DIR = Path("/var/lib/llm-appliance")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; the exit code."""
    options = _parser().parse_args(arguments)
    faulthandler.enable(2)  # a watchdog ends a blocked loop with SIGABRT: where it stood is in the log then
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every stray byte that strangers send
    try:
        config = load_config(_config_file(options.config), parse_overrides(options.set)).config
        listeners = _listeners(config, options.fd)
        files = read_files(config)
        refuse_open(listeners, allowed=config.gateway.allow_open or files.keys.required)
    except ApplianceError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return int(error.exit_code)
    _raise_descriptor_limit()
    if files.keys.required and files.tls is None and any(is_open_to_others(listener) for listener in listeners):
        log.warning("API keys and prompts cross the network in clear text: set gateway.tls_certificate, or let a proxy do TLS")
    asyncio.run(_serve(config, files, options, listeners))
    return 0


async def _serve(config: Config, files: Files, options: argparse.Namespace, listeners: Sequence[socket.socket]) -> None:
    await Server(config, files, options.run_dir, options.state_dir).run(listeners)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway", description="The HTTP face of the LLM appliance.")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"configuration [default: {DEFAULT_PATH} where it exists]")
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR, metavar="DIR", help="where control.sock is [default: %(default)s]")
    parser.add_argument("--state-dir", type=Path, default=STATE_DIR, metavar="DIR", help="what is kept [default: %(default)s]")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="over the configuration; may be repeated")
    parser.add_argument("--fd", type=int, metavar="N", help="listen on this open socket instead of gateway.host and gateway.port")
    return parser


def _config_file(given: Path | None) -> Path | None:
    return given if given is not None or not DEFAULT_PATH.exists() else DEFAULT_PATH


def _listeners(config: Config, fd: int | None) -> list[socket.socket]:
    """From the parent, from systemd, or our own, in this order."""
    if fd is not None:
        return [adopt_listener(fd)]
    return passed_listeners(os.environ, os.getpid()) or [open_listener(config.gateway.host, config.gateway.port)]


def _raise_descriptor_limit() -> None:
    """Every client is a descriptor, and the soft limit of 1024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536, hard))


if __name__ == "__main__":
    sys.exit(main())
