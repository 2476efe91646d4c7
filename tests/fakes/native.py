"""A stand-in for the built-in engine's process, spare included, with the fake engine in it. Standard library only.

    python tests/fakes/native.py FOLDER -m appliance.engine (--spare | --socket PATH ...) ...

A spare behaves as the word in the file FOLDER/spare says when it matters:
    (nothing)        loads, waits, takes over
    never-warm       goes on loading
    dies-loading     exits with 66 and a sentence
    imported         leaves its weights to the engine
    mute             is warm and hears nothing
    dies-when-told   exits with 3 when it is to take over
    dies-taken       says that it takes over and is killed
    never-serves     says that it takes over, and then nothing

A weight holder (-m appliance.engine.weight_holder) says that it holds, and waits; unless FOLDER/holder says:
    dies-loading     exits with 66 and a sentence
    never-ready      goes on loading
    refused          holds, and is told by somebody that its block is damaged: exits with 65 and a sentence
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

FAKE_ENGINE = Path(__file__).parent / "engine.py"


def main() -> None:
    """An engine at once, or a spare until it is told."""
    folder, *arguments = sys.argv[1:]
    is_holder = "appliance.engine.weight_holder" in arguments
    with (Path(folder) / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {'holder' if is_holder else 'spare' if '--spare' in arguments else 'engine'}\n")
    if is_holder:
        be_holder(Path(folder) / "holder")
    os.execv(sys.executable, [sys.executable, str(FAKE_ENGINE), *(be_spare(Path(folder)) if "--spare" in arguments else arguments)])


def be_holder(behaviour: Path) -> NoReturn:
    """Until killed."""
    word = behaviour.read_text().strip() if behaviour.exists() else ""
    listener = socket.socket(fileno=os.dup(0))
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    if word == "dies-loading":
        print("ModelError: there is nothing to hold", file=sys.stderr, flush=True)
        sys.exit(66)
    if word != "never-ready":
        print("The weights are held. bytes=4096", file=sys.stderr, flush=True)
    while not behaviour.exists() or behaviour.read_text().strip() != "refused":
        time.sleep(0.02)
    print("The weights are given up because one bit is another", file=sys.stderr, flush=True)
    sys.exit(65)


def be_spare(folder: Path) -> list[str]:
    """The arguments of the engine to be."""

    def is_to(*words: str) -> bool:
        file = folder / "spare"
        return file.exists() and file.read_text().strip() in words

    if is_to("dies-loading"):
        print("ModelError: this folder is not for me", file=sys.stderr, flush=True)
        sys.exit(66)
    channel = socket.socket(fileno=os.dup(0))
    if not is_to("never-warm"):
        channel.send(b"warm imported" if is_to("imported") else b"warm mapped")
    while message := channel.recv(65536):
        if is_to("mute"):
            continue
        if message == b"ping":
            channel.send(b"pong")
            continue
        if is_to("dies-when-told"):
            sys.exit(3)
        channel.send(b"taken")
        if is_to("dies-taken"):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_to("never-serves"):
            time.sleep(600)
        command: list[str] = json.loads(message)
        return command[3:]
    sys.exit(0)


if __name__ == "__main__":
    main()
