"""`appliancectl run` as systemd's stand-in, with small real children."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from appliance.cli.foreground.children import FIRST_DELAY_S
from appliance.cli.foreground.session import ONE_REQUEST_S

ROOT = Path(__file__).parents[4]

PROGRAM = """
import socket, sys
from pathlib import Path
from appliance.cli.foreground.children import Child
from appliance.cli.foreground.notices import Notices
from appliance.cli.foreground.output import Output
from appliance.cli.foreground.publications import PublicationFeed
from appliance.cli.foreground.session import Member, Session

DEADLINE = 30.0
SILENCE = 60.0
notices = Notices(Path(RUN))

def child(name, source):
    argv = [sys.executable, "-u", "-c", source]
    return Member(Child(name, argv, environment=notices.environment(SILENCE)), DEADLINE, SILENCE)

listener = socket.create_server(("127.0.0.1", 0))
members = [child(name, source) for name, source in CHILDREN]
feed = PublicationFeed(Path(RUN) / "control.sock")
session = Session(members, feed, notices, Output(1), lambda publication: publication.reason, listener)
sys.exit(session.run())
"""
TELL = """
import os, socket
def tell(words):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(words, os.environ["NOTIFY_SOCKET"])
"""
BLOCK = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
OBEDIENT = f"""{BLOCK}
import os
print("up", os.getpid(), flush=True)
signal.sigwait([signal.SIGTERM])
print("asked to end", flush=True)
"""
LIVELY = f"""{BLOCK}{TELL}
tell(b"READY=1")
print("up", os.getpid(), flush=True)
import time
while signal.SIGTERM not in signal.sigpending():  # sigtimedwait takes a SIGCONT for its own end
    time.sleep(0.1)
    tell(b"WATCHDOG=1")
"""
STUBBORN = BLOCK + "import os, time; print('up', os.getpid(), flush=True)\nwhile True: time.sleep(60)\n"


class Run:
    """A session in a process of its own, read line by line."""

    def __init__(
        self,
        tmp_path: Path,
        children: list[tuple[str, str]],
        deadline_s: float = 30.0,
        silence_s: float = 60.0,
        ignored: tuple[signal.Signals, ...] = (),
    ) -> None:
        ignore = "".join(f"signal.signal({int(number)}, signal.SIG_IGN)\n" for number in ignored)
        chosen = PROGRAM.replace("DEADLINE = 30.0", f"DEADLINE = {deadline_s}").replace("SILENCE = 60.0", f"SILENCE = {silence_s}")
        program = f"import signal\n{ignore}CHILDREN = {children!r}\nRUN = {str(tmp_path)!r}\n{chosen}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.seen: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Read on to the line that matches, for a minute at most."""
        giving_up = threading.Timer(60, self.process.kill)
        giving_up.start()
        try:
            for line in self.process.stdout:
                self.seen.append(line.rstrip("\n"))
                if match := re.search(pattern, line):
                    return match
        finally:
            giving_up.cancel()
        raise AssertionError(f"no line matches {pattern!r}:\n" + "\n".join(self.seen))

    def rest(self) -> str:
        """Everything up to the end."""
        out, _ = self.process.communicate(timeout=60)
        self.seen += out.splitlines()
        return "\n".join(self.seen)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[object]:
    """Sessions that are gone after the test, whatever happened in it."""
    started: list[Run] = []

    def start(*children: tuple[str, str], **chosen: object) -> Run:
        started.append(Run(tmp_path, list(children), **chosen))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            children = psutil.Process(run.process.pid).children()
            run.process.kill()
            for child in children:  # the stubborn ones
                child.kill()
        run.process.communicate()


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 30
    while _alive(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_children_in_order_and_is_exit_code_0(runs, number: signal.Signals) -> None:
    """The gateway drains while the engine's owner still serves; only then is that one asked."""
    run = runs(("gateway", OBEDIENT), ("applianced", OBEDIENT))
    pids = [int(run.until(r" up (\d+)")[1]) for _ in range(2)]
    run.process.send_signal(number)
    said = run.rest()
    assert run.process.returncode == 0, said
    order = [said.index(text) for text in ("gateway     asked", "gateway has ended", "applianced  asked", "applianced has ended")]
    assert order == sorted(order), said
    assert not any(map(_alive, pids))


def test_a_dead_child_is_started_again(runs) -> None:
    """kill -9 of one leaves the other alone."""
    run = runs(("gateway", OBEDIENT), ("applianced", OBEDIENT))
    pids = {}
    for _ in range(2):
        match = run.until(r"(\w+) +up (\d+)")
        pids[match[1]] = int(match[2])
    os.kill(pids["gateway"], signal.SIGKILL)
    run.until(rf"gateway ended unasked \(killed by SIGKILL\); starting it again in {FIRST_DELAY_S} s")
    again = int(run.until(r"gateway +up (\d+)")[1])
    assert again != pids["gateway"]
    assert _alive(pids["applianced"])
    run.process.send_signal(signal.SIGTERM)
    run.rest()
    assert run.process.returncode == 0


def test_a_child_that_cannot_start_ends_everything_with_its_reason(runs) -> None:
    """It said no before it was ready even once, and would say so again: one try, one sentence, exit code 1."""
    run = runs(("gateway", OBEDIENT), ("applianced", "import sys; print('ERROR no way'); print(); sys.exit(7)"))
    said = run.rest()
    assert run.process.returncode == 1
    assert "applianced cannot start (exit code 7): no way\n" in said
    assert said.count("no way") == 2
    assert "gateway has ended" in said


def test_a_child_that_was_ready_is_tried_again_and_given_up_with_its_last_words(runs) -> None:
    """A growing wait, then everything ends with exit code 1."""
    run = runs(("gateway", OBEDIENT), ("applianced", f"{TELL}import sys; tell(b'READY=1'); print('no way'); sys.exit(7)"))
    said = run.rest()
    assert run.process.returncode == 1
    assert said.count("  no way") == 6
    assert "applianced ended 6 times right after its start (exit code 7); giving up: no way" in said
    assert "gateway has ended (exit code 0)" in said


def test_a_child_that_was_stopped_goes_on(runs) -> None:
    """SIGSTOP: noticed, said, and taken back, so that nobody loses an answer over it; it is the same process afterwards."""
    run = runs(("gateway", LIVELY), ("applianced", LIVELY), silence_s=1.0)
    pids = {match[1]: int(match[2]) for match in (run.until(r"(\w+) +up (\d+)") for _ in range(2))}
    os.kill(pids["gateway"], signal.SIGSTOP)
    began_s = time.monotonic()
    run.until(r"gateway was stopped by a signal and has been silent for 1\.\d s: letting it go on")
    assert time.monotonic() - began_s < 10
    os.kill(pids["applianced"], signal.SIGSTOP)
    run.until(r"applianced was stopped by a signal")
    assert all(map(_alive, pids.values())), run.seen
    run.process.send_signal(signal.SIGTERM)
    assert "ending it" not in run.rest()
    assert run.process.returncode == 0


def test_a_child_that_is_stopped_again_and_again_is_replaced(runs) -> None:
    """Whoever holds it down does not let it go on: a life that nobody stops serves better."""
    run = runs(("gateway", LIVELY), ("applianced", LIVELY), silence_s=1.0)
    pids = {match[1]: int(match[2]) for match in (run.until(r"(\w+) +up (\d+)") for _ in range(2))}
    stop = threading.Event()

    def hold_down() -> None:
        while not stop.wait(0.01):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["gateway"], signal.SIGSTOP)

    holding = threading.Thread(target=hold_down)
    holding.start()
    try:
        run.until(r"gateway was stopped by a signal .*: letting it go on \(SIGCONT\)")
        run.until(r"gateway has given no sign of life for .* s: ending it \(SIGKILL\), to start it again")
        assert int(run.until(r"gateway +up (\d+)")[1]) != pids["gateway"]
    finally:
        stop.set()
        holding.join()


def test_a_child_whose_loop_is_blocked_is_killed_and_started_again(runs) -> None:
    """It runs and says nothing; being asked to go on would not help. Where it stands is told by its own fault handler."""
    blocked = f"""{BLOCK}{TELL}
import faulthandler, time
faulthandler.enable(2)
def a_handler_that_sleeps(): time.sleep(3600)
print('up', os.getpid(), flush=True)
tell(b'READY=1')
a_handler_that_sleeps()
"""
    run = runs(("gateway", LIVELY), ("applianced", blocked), silence_s=1.0)
    first = int(run.until(r"applianced +up (\d+)")[1])
    run.until(r"applianced has given no sign of life for 1\.\d s: ending it \(SIGABRT\), to start it again")
    run.until(r"applianced .* in a_handler_that_sleeps")
    run.until(r"applianced ended \(killed by SIGABRT\); starting it again")
    assert int(run.until(r"applianced +up (\d+)")[1]) != first


def test_a_session_that_was_suspended_blames_nobody(runs) -> None:
    """Ctrl-Z and fg: what the children said meanwhile is heard before they are judged."""
    run = runs(("gateway", LIVELY), ("applianced", LIVELY), silence_s=1.0)
    pids = [int(run.until(r" +up (\d+)")[1]) for _ in range(2)]
    run.process.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2.5:
        time.sleep(0.05)
    run.process.send_signal(signal.SIGCONT)
    began_s = time.monotonic()
    while time.monotonic() < began_s + 1.5:
        time.sleep(0.05)
    assert all(map(_alive, pids))
    run.process.send_signal(signal.SIGTERM)
    said = run.rest()
    assert not any(words in said for words in ("no sign of life", "stopped by a signal", "starting it again"))
    assert run.process.returncode == 0


def test_nobody_speaks_for_a_child(runs, tmp_path: Path) -> None:
    """A message counts by who has sent it: a stranger's READY=1 makes nothing ready."""
    run = runs(("gateway", OBEDIENT), ("applianced", _publisher(tmp_path, ready=False)))
    run.until(r" +up ")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(str(tmp_path / "notify.sock"))
        stranger.send(b"READY=1")
    run.until(r"published")
    run.process.send_signal(signal.SIGTERM)
    assert "\nlife " not in run.rest()


def test_a_child_that_does_not_end_is_killed_at_its_deadline(runs) -> None:
    """And that is said."""
    run = runs(("gateway", STUBBORN), ("applianced", OBEDIENT), deadline_s=0.5)
    for _ in range(2):
        run.until(r"  up ")
    run.process.send_signal(signal.SIGTERM)
    said = run.rest()
    assert "gateway has not ended within 0.5 s of SIGTERM: killing it" in said
    assert "gateway has ended (killed by SIGKILL)" in said
    assert run.process.returncode == 0


def test_the_second_signal_asks_everybody_and_kills_after_a_moment(runs) -> None:
    """Nobody waits for a drain that was called off."""
    run = runs(("gateway", STUBBORN), ("applianced", OBEDIENT))
    for _ in range(2):
        run.until(r"  up ")
    run.process.send_signal(signal.SIGINT)
    run.until("stopping: running answers may finish")
    started_s = time.monotonic()
    while time.monotonic() < started_s + 1.5 * ONE_REQUEST_S:
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    said = run.rest()
    assert "applianced  asked to end" in said
    assert "gateway has ended (killed by SIGKILL)" in said
    assert time.monotonic() - started_s < 15


def test_the_same_ctrl_c_from_two_senders_is_one_request(runs) -> None:
    """A terminal signals the whole group, and `timeout` or a shell passes it on: the drain is not called off by that."""
    run = runs(("gateway", OBEDIENT), ("applianced", OBEDIENT))
    for _ in range(2):
        run.until(r"  up ")
    run.process.send_signal(signal.SIGINT)
    run.until("stopping: running answers may finish")
    run.process.send_signal(signal.SIGINT)
    assert "stopping at once" not in run.rest()
    assert run.process.returncode == 0


def test_under_nohup_a_closed_terminal_ends_nothing_and_children_heed_their_signals(runs) -> None:
    """What a shell told `run` to ignore is not passed on to the engine."""
    run = runs(("gateway", OBEDIENT), ("applianced", OBEDIENT), ignored=(signal.SIGHUP, signal.SIGQUIT))
    pids = [int(run.until(r" up (\d+)")[1]) for _ in range(2)]
    run.process.send_signal(signal.SIGHUP)
    os.kill(pids[0], signal.SIGQUIT)
    run.until(r"ended unasked \(killed by SIGQUIT\)")
    run.until(r" up ")
    run.process.send_signal(signal.SIGTERM)
    run.rest()
    assert run.process.returncode == 0


def test_children_end_when_the_session_is_killed(runs) -> None:
    """kill -9 of `appliancectl run` leaves nothing behind."""
    run = runs(("gateway", OBEDIENT), ("applianced", OBEDIENT))
    pids = [int(run.until(r" up (\d+)")[1]) for _ in range(2)]
    run.process.kill()
    for pid in pids:
        _wait_until_gone(pid)


def test_a_child_that_closes_its_output_lives_on(runs) -> None:
    """It is not taken for dead, and it costs no processor time."""
    silent = BLOCK + "import os, signal; print('up', os.getpid(), flush=True); os.close(1); os.close(2); signal.sigwait([signal.SIGTERM])"
    run = runs(("gateway", OBEDIENT), ("applianced", silent))
    for _ in range(2):
        run.until(r"  up ")
    ticks = _cpu_ticks(run.process.pid)
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert _cpu_ticks(run.process.pid) - ticks < 20, "the loop spins"
    run.process.send_signal(signal.SIGTERM)
    run.rest()
    assert run.process.returncode == 0


def _cpu_ticks(pid: int) -> int:
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(columns[11]) + int(columns[12])


def _publisher(tmp_path: Path, *, ready: bool) -> str:
    """An applianced that publishes, and says that it is ready, or not."""
    if len(str(tmp_path / "control.sock")) > 107:
        pytest.fail("the temporary folder's path is too long for a socket: set TMPDIR")
    return TELL + textwrap.dedent(
        f"""
        import asyncio, signal
        from pathlib import Path
        from appliance.control.server import ControlServer, PublicationBoard
        from appliance.core.publication import Publication
        from appliance.core.states import EngineState

        async def main():
            board = PublicationBoard(Publication(EngineState.STARTING, 1, None, None, f"life {{os.getpid()}}", 1.0))
            await ControlServer(Path({str(tmp_path)!r}) / "control.sock", {{}}, board).start()
            if {ready}:
                tell(b"READY=1")
            print("up", flush=True)
            await asyncio.sleep(0.5)
            print("published", flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )


def test_publications_reach_the_terminal_over_restarts_of_applianced(runs, tmp_path: Path) -> None:
    """The feed connects when the socket appears and again when it was lost; what it tells counts once both children are ready."""
    run = runs(("gateway", LIVELY), ("applianced", _publisher(tmp_path, ready=True)))
    first = int(run.until(r"^life (\d+)")[1])
    os.kill(first, signal.SIGKILL)
    assert int(run.until(r"^life (\d+)")[1]) != first
