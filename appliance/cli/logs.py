"""Log files for `diagnose`: read one after the other, with a bar where that takes a while and somebody watches."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from appliance.cli.printing import colour
from appliance.core.errors import ApplianceError
from appliance.core.evidence import Evidence, Source

if TYPE_CHECKING:  # half a second of patterns, which help and plan need not wait for
    from appliance.diagnosis.catalogue import Catalogue

BAR_FROM_BYTES = 50 * 1000**2
STDIN = Path("-")


@dataclass(frozen=True, slots=True)
class Log:
    """A file (- is stdin) and what it was given as; None finds out by itself."""

    path: Path
    source: Source | None = None


def read_logs(logs: Sequence[Log], since_s: float | None = None, catalogue: Catalogue | None = None) -> list[Evidence]:
    """The evidence of all of them, in the order given; the catalogue decides which lines of a long one are kept.

    Raises:
        click.UsageError: a file cannot be read, or stdin is named twice.
    """
    from appliance.diagnosis import read_evidence

    if sum(log.path == STDIN for log in logs) > 1:
        raise click.UsageError("- (stdin) can be read once only")
    evidence: list[Evidence] = []
    done_bytes = 0
    with _bar(sum(_size(log.path) for log in logs)) as show:
        for log in logs:
            progress = None if show is None else functools.partial(show, done_bytes)
            try:
                found = read_evidence(
                    sys.stdin.buffer if log.path == STDIN else log.path, log.source, progress=progress, catalogue=catalogue
                )
            except OSError as error:
                raise click.UsageError(f"{log.path}: {error.strerror}") from None
            except ApplianceError as error:
                raise click.UsageError(f"{log.path}: {error}") from None
            evidence += found if since_s is None else _newer(found, since_s)
            done_bytes += _size(log.path)
    return evidence


def _newer(evidence: Sequence[Evidence], since_s: float) -> Iterator[Evidence]:
    """Lines without a clock (a traceback) belong to the last one that had it."""
    keep = True
    for item in evidence:
        if item.time_s is not None:
            keep = item.time_s >= since_s
        if keep:
            yield item


def _size(path: Path) -> int:
    return 0 if path == STDIN else path.stat().st_size


@contextlib.contextmanager
def _bar(total_bytes: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar that is shown two numbers: bytes of the files before this one, bytes read of this one."""
    if total_bytes < BAR_FROM_BYTES or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=total_bytes, label="reading", file=sys.stderr, color=colour()) as bar:
        yield lambda before_bytes, read_bytes: bar.update(before_bytes + read_bytes - bar.pos)
