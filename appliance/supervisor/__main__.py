"""`applianced`: the command line, the start, and the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from appliance import diagnosis
from appliance.backends import backend_of
from appliance.config import Config, load_config, parse_overrides
from appliance.config.load import DEFAULT_PATH
from appliance.config.runtimes import with_runtime
from appliance.core.errors import ApplianceError, ConfigError
from appliance.diagnosis.catalogue import Catalogue
from appliance.gpu.cards import Roots
from appliance.supervisor.box import Box
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.fleet import Fleet, Make
from appliance.supervisor.fleet_verbs import FleetVerbs
from appliance.supervisor.groups import Delegation
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.layout import Machine, laid_out
from appliance.supervisor.log_outlet import configure
from appliance.supervisor.notify import notifier_from
from appliance.supervisor.records import Records
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.run_note import RunNote
from appliance.supervisor.service import Service
from appliance.supervisor.verbs import Verbs

EX_CONFIG = 78
"""sysexits.h; RestartPreventExitStatus=78 keeps systemd from trying a broken configuration again and again."""
EX_FAILED = 1
DEFAULT_STATE_DIR = Path("/var/lib/llm-appliance")
DEFAULT_RUN_DIR = Path("/run/llm-appliance")
MACHINE = Roots()
_PR_SET_CHILD_SUBREAPER = 36

log = structlog.get_logger()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """A mistake ends the process with code 2 and a sentence."""
    parser = argparse.ArgumentParser(
        prog="applianced",
        description="Owns the engine: starts it, watches it, finds out why it died, and brings it back.",
        epilog="example: applianced --config ./appliance.toml --state-dir ./state --run-dir ./run --set model.path=/srv/model",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"configuration [default: {DEFAULT_PATH}, if it exists]")
    parser.add_argument(
        "--state-dir", type=Path, default=DEFAULT_STATE_DIR, metavar="DIR", help="incidents and history [default: %(default)s]"
    )
    parser.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, metavar="DIR", help="sockets and lock [default: %(default)s]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="assignments", help="override a key; repeatable"
    )
    return parser.parse_args(arguments)


def load(arguments: argparse.Namespace) -> Config:
    """The effective configuration. Raises ConfigError."""
    path = arguments.config
    if path is None and DEFAULT_PATH.exists():
        path = DEFAULT_PATH
    return with_runtime(load_config(path, parse_overrides(arguments.assignments)).config, arguments.state_dir)


def load_patterns(config: Config) -> Catalogue:
    """Half a second that the first crash shall not wait for; what is wrong with an operator's file is told and left out."""
    folder = config.diagnosis.patterns_dir
    catalogue, problems = diagnosis.with_operator_patterns(Path(folder) if folder else None)
    for problem in problems:
        log.warning(problem)
    return catalogue


async def serve(arguments: argparse.Namespace, config: Config, run_dir: RunDir, roots: Roots) -> None:
    """From the lock to the end. Raises ControlError."""
    with contextlib.suppress(OSError):  # IncidentStore tells
        arguments.state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    catalogue = load_patterns(config)
    store = IncidentStore(arguments.state_dir, config.diagnosis.keep_incidents)
    diagnose = functools.partial(diagnosis.diagnose, catalogue=catalogue)
    make = functools.partial(Supervisor, diagnose=diagnose, is_fatal_line=catalogue.fatal)
    try:
        adopts_orphans = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        box = Box.of(config, store, roots=roots, delegation=Delegation.find(), adopts_orphans=adopts_orphans)
        service = put_together(arguments, config, run_dir, store, box, make)
        # What exists now lives for ever; keep the collector from walking it (and from dirtying its pages in forked children).
        gc.collect()
        gc.freeze()
        await service.run()
    finally:
        store.close()


def put_together(arguments: argparse.Namespace, config: Config, run_dir: RunDir, store: IncidentStore, box: Box, make: Make) -> Service:
    """One engine, or one on each card. Raises ApplianceError where a folder cannot be made."""
    note, notifier = RunNote(store, box.ears.log.boot_id), notifier_from(os.environ)
    layout = laid_out(config, machine(box), uses_gpu=backend_of(config).uses_gpu)
    if layout.words:
        log.info(layout.words)
    if layout.shares:
        fleet = Fleet(config, layout, run_dir, store, notifier, box, make)
        return Service(fleet, FleetVerbs(fleet).handlers, note, lambda: load(arguments))
    supervisor = make(layout.of(config), run_dir, store, notifier, box)
    return Service(supervisor, Verbs(supervisor).handlers | Records(store).handlers, note, lambda: layout.of(load(arguments)))


def machine(box: Box) -> Machine:
    """What there is to be shared out."""
    cards = tuple(card.address for card in box.cards.ours())
    return Machine(cards, len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def main(arguments: Sequence[str] | None = None, roots: Roots = MACHINE) -> int:
    """Exit code: 0 after a requested stop, 78 for a configuration that cannot work, 1 for the rest. `roots`: other places in tests."""
    parsed = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    faulthandler.enable(2)  # a watchdog ends a blocked loop with SIGABRT: where it stood is in the log then
    outlet = configure()
    try:
        config = load(parsed)
        run_dir = RunDir(parsed.run_dir.absolute())
        run_dir.take()
        asyncio.run(serve(parsed, config, run_dir, roots))
    except ConfigError as error:
        log.error("the configuration cannot be used", error=str(error))
        return EX_CONFIG
    except ApplianceError as error:
        log.error(str(error))
        return EX_FAILED
    except Exception:
        log.exception("applianced failed by a defect; please report this")
        return EX_FAILED
    finally:
        outlet.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
