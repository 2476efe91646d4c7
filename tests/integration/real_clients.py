"""Clients that people use, unmodified, in front of the built-in engine: undisturbed, and with the engine killed under them.

    python tests/integration/real_clients.py [--environments FOLDER] [--only NAME ...] [--model DIR]

Their packages come into environments of their own (--environments keeps them for the next time). Every answer to the one question, however
it was asked for, must be the text that a plain request gets; and all answers the same again while engines die.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.integration.client_programs import ALL, CLIENTS, TIMEOUT_S, Place, installed, missing  # noqa: E402
from tests.integration.conftest import Foreground  # noqa: E402

KILL_EVERY_S = 6.0
Json = dict[str, Any]
Seen = dict[tuple[str, str], str]
"""The text by client and way."""


def plain(place: Place) -> str:
    """The text that a request without any client library gets."""
    url = f"{place.url}/v1/chat/completions"
    request = urllib.request.Request(url, place.body().read_bytes(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def that_calls_tools(model: Path, folder: Path) -> Path:
    """The model with a template that tells it of tools; the demo model's own knows of none."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    template = folder / "chat_template.jinja"
    template.unlink(missing_ok=True)
    shutil.copy(CLIENTS / "tools.jinja", template)
    return folder


def wrong_in(name: str, place: Place, right: str, seen: Seen) -> list[str]:
    """What is wrong with a client's answers."""
    try:
        answers = ALL[name].ask(place)
    except (RuntimeError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return [f"{name}: {error}"]
    problems = [] if answers else [f"{name}: no answer"]
    for one in answers:
        text = str(one["text"]).strip()  # some clients strip what they print
        expected = seen.setdefault((name, one["how"]), text) if one.get("own") else right.strip()
        problems += [] if text == expected else [f"{name}, {one['how']}: {text!r}\n  and not {expected!r}"]
    usages = {answer["usage"] for answer in answers if answer.get("usage") is not None}
    return problems + ([f"{name}: usages differ: {usages}"] if len(usages) > 1 else [])


def keep_killing(status: Callable[[], Json], stop: threading.Event, kills: list[int]) -> None:
    """An engine every few seconds, whenever one serves."""
    while not stop.wait(KILL_EVERY_S):
        with suppress(Exception):
            found = status()
            if found["state"] == "serving" and found["engine_pid"]:
                os.kill(found["engine_pid"], signal.SIGKILL)
                kills.append(found["generation"])


def one_pass(names: Sequence[str], place: Place, right: str, seen: Seen, kills: list[int] | None) -> int:
    """Every client once; how many tripped."""
    tripped = 0
    for name in names:
        began_s, before = time.monotonic(), len(kills or ())
        problems = wrong_in(name, place, right, seen)
        tripped += bool(problems)
        over = f" over {len(kills) - before} kills" if kills is not None else ""
        print(f"{name}: {'WRONG' if problems else 'ok'}{over} ({time.monotonic() - began_s:.1f} s)", *problems, sep="\n", flush=True)
    return tripped


def run_all(names: Sequence[str], model_dir: Path, environments: Path, folder: Path) -> int:
    """Both passes; how many tripped in each, added up."""
    settings = ("supervisor.stable_after_s=1", "supervisor.probe_interval_s=0.2", "supervisor.backoff_first_s=0.1")
    arguments = [part for one in settings for part in ("--set", one)]
    appliance = Foreground(
        folder / "state", "--model", str(that_calls_tools(model_dir, folder / model_dir.name)), "--port", "0", *arguments
    )
    stop, kills, seen = threading.Event(), list[int](), Seen()
    try:
        model, url = appliance.wait_until_serving()
        place = Place(url, model, model_dir, environments, folder)
        right = plain(place)
        tripped = one_pass(names, place, right, seen, None)
        threading.Thread(target=keep_killing, args=(appliance.status, stop, kills), daemon=True).start()
        tripped += one_pass(names, place, right, seen, kills)
        print(f"{len(names)} clients, {len(kills)} engines killed, {tripped} tripped", flush=True)
        return tripped
    finally:
        stop.set()
        appliance.stop()


def main() -> int:
    """1 when a client tripped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environments", type=Path, help="where their packages are, or come to be [default: a folder that is removed]")
    parser.add_argument("--only", nargs="+", choices=sorted(ALL), default=list(ALL))
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left
    folder = Path(tempfile.mkdtemp(prefix="clients-"))
    names = [name for name in options.only if not missing(name)]
    for name in options.only:
        if name not in names:
            print(f"{name}: NOT CHECKED, {missing(name)} is not here", flush=True)
    try:
        environments = (options.environments or folder / "environments").resolve()
        installed(names, environments)
        return 1 if run_all(names, options.model, environments, folder) else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
