"""`appliancectl top`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path

import click

from appliance.cli import terminal
from appliance.cli.gateway_address import KEY_CURE, gateway_url, key_in
from appliance.cli.place import Place
from appliance.cli.printing import say, say_json
from appliance.cli.quantities import FiniteRange
from appliance.cli.top_feed import Feed
from appliance.cli.top_screen import screen
from appliance.cli.verbs import Verb
from appliance.core.errors import ExitCode, Unreachable

ONCE_S = 6.0
SETTLE_S = 0.3
"""After the first word, for what comes with it: applianced's part, the cards."""
PAGE_WIDTH, PAGE_HEIGHT = 100, 60
"""Of what no terminal shows."""


@click.command(cls=Verb)
@click.option("--url", help="The gateway [default: as configured].")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File whose only line is an API key.")
@click.option("--once", is_flag=True, help="Print it once and end.")
@click.option("--interval", "interval_s", type=FiniteRange(0.2, 3600), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs: a line each time.")
@click.pass_obj
def top(place: Place, url: str | None, api_key_file: Path | None, once: bool, interval_s: float, as_json: bool) -> ExitCode:
    """What the page shows, in a terminal, live.

    Slots and queue, speed, KV pool and cards, the rung and why, the last incidents. Ctrl-C or q ends it. Without a gateway it shows what
    applianced knows. In a pipe it prints one picture after the other, without colours.

    \b
    Example:
      appliancectl top
      appliancectl top --once
      appliancectl top --json | jq '.now.slots.in_use'
    """
    feed = Feed(url or gateway_url(place), key_in(api_key_file), place)
    feed.start()
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            return _once(feed, as_json)
        if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print_for_ever(feed, interval_s, as_json)
        else:
            _show_for_ever(feed, interval_s)
    return ExitCode.OK


def _once(feed: Feed, as_json: bool) -> ExitCode:
    _wait_first(feed)
    if as_json:
        say_json(feed.view.document())
    else:
        _print(feed)
    return ExitCode.OK


def _wait_first(feed: Feed) -> None:
    """Until something is known. Raises Unreachable where nobody says anything."""
    due_s = time.monotonic() + ONCE_S
    while not feed.view.heard_s and time.monotonic() < due_s and not feed.changed.is_set():
        feed.changed.wait(0.1)
    if not feed.view.heard_s:
        wants_key = KEY_CURE in feed.view.problem
        hint = None if wants_key else "is the appliance running? `appliancectl status`, or name the gateway with --url"
        raise Unreachable(feed.view.problem, hint=hint)
    while not (feed.view.machine and feed.view.ladder) and time.monotonic() < due_s and not _applianced_away(feed):
        time.sleep(0.05)
    time.sleep(SETTLE_S)


def _applianced_away(feed: Feed) -> bool:
    problem = (feed.view.now.get("applianced") or {}).get("problem")
    return bool(problem) and problem != "not asked yet"


def _print(feed: Feed) -> None:
    size = shutil.get_terminal_size((PAGE_WIDTH, PAGE_HEIGHT))
    height = size.lines if sys.stdout.isatty() else PAGE_HEIGHT
    for line in screen(feed.view, size.columns, height, time.monotonic()):
        say(line)


def _print_for_ever(feed: Feed, interval_s: float, as_json: bool) -> None:
    _wait_first(feed)
    while True:
        if as_json:
            say_json(feed.view.document(), on_one_line=True)
        else:
            _print(feed)
            say()
        sys.stdout.flush()
        time.sleep(interval_s)


def _show_for_ever(feed: Feed, interval_s: float) -> None:
    with terminal.whole_screen() as shown:
        while True:
            columns, lines = shutil.get_terminal_size()
            shown.draw(screen(feed.view, columns, lines, time.monotonic()))
            if shown.leave_within(interval_s):
                return
