"""Entry point of `appliancectl`, and the one place where errors become words and exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from appliance.cli.verbs import appliancectl
from appliance.core.errors import ApplianceError, ExitCode

_CANNOT_PRINT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Of a write to stdout, which names no file: the disk behind it is full or gone. Verbs tell of their own files themselves."""
INTERRUPTED = 130
"""What shells report for a program that SIGINT ended."""


def main() -> None:
    """The console script."""
    if sys.stdin is None:  # closed by the caller: `appliancectl diagnose - <&-`
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - until the process ends, as below
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `appliancectl status >&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            # A file name or a log line may hold bytes that are no UTF-8, and the locale may be "C".
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors of ours and of the caller's go to stderr, without a traceback."""
    try:
        result = appliancectl.main(list(arguments), prog_name="appliancectl", standalone_mode=False)
        sys.stdout.flush()
    except ApplianceError as error:
        _complain(error.message, error.hint)
        return error.exit_code
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a verb; click < 8.2 has no such class
            error.show()
            return ExitCode.USAGE
        _complain(error.format_message(), f"see `{error.ctx.command_path if error.ctx else 'appliancectl'} --help`")
        return ExitCode.USAGE
    except click.ClickException as error:
        _complain(error.format_message(), None)
        return ExitCode.BAD
    except click.Abort:  # click's word for Ctrl-C
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough: `appliancectl incidents | head -1`
        _silence_stdout()
        return ExitCode.OK
    except SystemExit as gone:  # click's own answer to the same
        if "PacifyFlushWrapper" in type(sys.stdout).__name__:  # its class is not to be imported any more
            return ExitCode.OK
        raise gone
    except OSError as error:
        if error.filename is not None or error.errno not in _CANNOT_PRINT:
            raise
        _silence_stdout()
        _complain(f"the output cannot be written: {error.strerror}", None)
        return ExitCode.BAD
    return result if isinstance(result, int) else ExitCode.OK


def _complain(message: str, hint: str | None) -> None:
    click.echo(click.style("appliancectl: ", fg="red", bold=True) + message, err=True, color=_colour())
    if hint:
        click.echo(f"  {hint}", err=True)


def _colour() -> bool | None:
    from appliance.cli.printing import colour

    return colour()


def _silence_stdout() -> None:
    """Keep the interpreter's own flush at exit from complaining about the same pipe."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
