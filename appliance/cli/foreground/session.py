"""The loop of `appliancectl run`: one thread, one selector; children, signals, publications and the terminal."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from appliance.cli.foreground.children import QUICK_FAILURES_MAX, Child, Ended
from appliance.cli.foreground.notices import Notices
from appliance.cli.foreground.output import Output
from appliance.cli.foreground.publications import PublicationFeed
from appliance.cli.foreground.rendering import plain, render
from appliance.core.errors import ControlError, ExitCode
from appliance.core.publication import Publication

RECONNECT_S = 0.1
NOW_S = 3.0
"""After the second signal: then SIGKILL."""
ONE_REQUEST_S = 0.5
"""Signals so close together are one request: a terminal, a shell and `timeout` may each pass on the same Ctrl-C."""
WATCHDOG_S = 10.0
"""A child that is ready and gives no sign of life for so long has hung. Both give one every second or oftener."""
START_S = 60.0
"""For one that is not ready yet, as TimeoutStartSec= of the units."""
LOOK_S = 0.5
AGAIN_S = 60.0
"""A child that is stopped twice within so long is held down by somebody, and replaced."""
LATE_S = 2.0
"""Who looks so late was held up himself, and judges nobody."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Member:
    """A child and how long it may take to end when asked to."""

    child: Child
    stop_deadline_s: float
    silence_s: float = WATCHDOG_S


class Session:
    """Owns the children from start to end. Stops them in the order given: the gateway drains while the engine still serves."""

    def __init__(
        self,
        members: Sequence[Member],
        feed: PublicationFeed,
        notices: Notices,
        output: Output,
        on_publication: Callable[[Publication], str | None],
        listener: socket.socket,
    ) -> None:
        """`on_publication` is told of each, as soon as all the members are ready, and may say something of it."""
        self._members = members
        self._feed = feed
        self._notices = notices
        self._output = output
        self._on_publication = on_publication
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._publication: Publication | None = None
        self._looked_s = time.monotonic()
        self._stop_requests = 0
        self._stop_requested_s = 0.0
        self._result = ExitCode.OK

    def run(self) -> ExitCode:
        """Start everything; return when everything has ended."""
        with self._signals():
            for member in reversed(self._members):  # applianced first: the gateway asks it for the engine
                self._start(member)
            self._follow()
            self._selector.register(self._notices, selectors.EVENT_READ, self._notified)
            self._look()
            while self._stop_requests == 0 or any(member.child.alive for member in self._members):
                self._turn()
        self._feed.close()
        self._notices.close()
        self._output.finish()
        return self._result

    def say(self, text: str) -> None:
        """A line of our own."""
        self._output.put(render("run", text, _clock()))

    def _turn(self) -> None:
        self._watch_output()
        timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout_s):
            key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), action))

    def _watch_output(self) -> None:
        watched = self._output.fd in self._selector.get_map()
        if self._output.waiting and not watched:
            self._selector.register(self._output.fd, selectors.EVENT_WRITE, self._output.write_some)
        elif watched and not self._output.waiting:
            self._selector.unregister(self._output.fd)

    # Children

    def _start(self, member: Member) -> None:
        if self._stop_requests:
            return
        child = member.child
        child.start(time.monotonic())
        pidfd = os.pidfd_open(child.pid)
        self._selector.register(child.output_fd, selectors.EVENT_READ, lambda: self._read(child))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(member, pidfd))

    def _read(self, child: Child) -> None:
        if not child.alive:  # its end was handled earlier in the same turn
            return
        for line in child.lines():
            self._output.put(render(child.name, line, _clock()))
        if child.output_ended:
            self._selector.unregister(child.output_fd)

    def _ended(self, member: Member, pidfd: int) -> None:
        child = member.child
        if not child.output_ended:
            self._read(child)
        if not child.output_ended:
            self._selector.unregister(child.output_fd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        now_s = time.monotonic()
        ended = child.reap(now_s)
        if self._stop_requests:
            self.say(f"{child.name} has ended ({ended.words})")
            self._stop_next()
        elif ended.next_start_s is None:
            self._result = ExitCode.BAD
            self._begin_stop(_given_up(child, ended))
        else:
            delay_s = ended.next_start_s - now_s
            unasked = "" if child.killed else " unasked"
            self.say(f"{child.name} ended{unasked} ({ended.words}); starting it again in {delay_s:.1f} s")
            self._after(delay_s, lambda: self._start(member))

    # Signs of life

    def _notified(self) -> None:
        now_s = time.monotonic()
        for pid, message in self._notices.read():
            for member in self._members:
                if member.child.alive and member.child.pid == pid:
                    member.child.hear(message, now_s)
        self._announce()

    def _look(self) -> None:
        """As systemd's watchdog does. Not while we stop: that has deadlines of its own."""
        if self._stop_requests:
            return
        now_s = time.monotonic()
        self._notified()  # after a stop of our own (Ctrl-Z), the selector may say that nothing has come
        late = now_s - self._looked_s > LATE_S  # the whole machine may have stood still, as a virtual one does for a snapshot
        for member in self._members:
            if member.child.alive and late:
                member.child.be_patient(now_s)
            elif member.child.alive:
                self._judge(member, now_s)
        self._looked_s = now_s
        self._after(LOOK_S, self._look)

    def _judge(self, member: Member, now_s: float) -> None:
        """One that somebody has stopped is let go on first, which costs nobody anything; what stays silent is ended, with its stacks."""
        child, silent_s = member.child, member.child.silent_s(now_s)
        if silent_s <= (member.silence_s if child.ready else START_S):
            return
        state = child.run_state
        if state == "t":  # somebody looks at it with a debugger
            return
        child.be_patient(now_s)
        if state == "T" and now_s - child.woken_s > AGAIN_S:
            self.say(f"{child.name} was stopped by a signal and has been silent for {silent_s:.1f} s: letting it go on (SIGCONT)")
            child.woken_s = now_s
            child.signal(signal.SIGCONT)
        else:
            what = "given no sign of life" if child.ready else "not become ready"
            how = signal.SIGKILL if child.killed or state == "T" else signal.SIGABRT
            self.say(f"{child.name} has {what} for {silent_s:.1f} s: ending it ({how.name}), to start it again")
            child.killed = True
            child.signal(how)

    # Stopping

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signal handlers only write a byte; the loop reads it."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        heard = [number for number in STOP_SIGNALS if not (number is signal.SIGHUP and _under_nohup())]
        before = {number: signal.signal(number, lambda *_: None) for number in heard}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._signalled(os.read(reader, 512)))
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            os.close(reader)
            os.close(writer)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._request_stop()

    def _request_stop(self) -> None:
        now_s = time.monotonic()
        if self._stop_requests and now_s - self._stop_requested_s < ONE_REQUEST_S:
            return
        self._stop_requested_s = now_s
        if self._stop_requests == 0:
            self._begin_stop("stopping: running answers may finish; once more to stop at once")
            return
        self._stop_requests += 1
        if self._stop_requests == 2:
            self.say("stopping at once")
            self._signal_all(signal.SIGTERM)
            self._after(NOW_S, lambda: self._signal_all(signal.SIGKILL))
        else:
            self._signal_all(signal.SIGKILL)

    def _begin_stop(self, why: str) -> None:
        self._stop_requests = 1
        self.say(why)
        self._listener.close()
        self._stop_next()

    def _stop_next(self) -> None:
        """Ask the first that lives; the next one's turn comes when it has ended."""
        for member in self._members:
            if member.child.alive:
                member.child.signal(signal.SIGTERM)
                self._after(member.stop_deadline_s, lambda member=member: self._overdue(member))  # type: ignore[misc]
                return

    def _overdue(self, member: Member) -> None:
        if member.child.alive:
            self.say(f"{member.child.name} has not ended within {member.stop_deadline_s:g} s of SIGTERM: killing it")
            member.child.signal(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self._members:
            member.child.signal(number)

    # Publications

    def _follow(self) -> None:
        if self._feed.connect():
            self._selector.register(self._feed, selectors.EVENT_READ, self._published)
        else:
            self._after(RECONNECT_S, self._follow)

    def _published(self) -> None:
        try:
            for publication in self._feed.read():
                self._publication = publication
                self._announce()
        except ControlError:  # applianced is gone or going; its next life is followed again
            self._selector.unregister(self._feed)
            self._feed.close()
            self._after(RECONNECT_S, self._follow)

    def _announce(self) -> None:
        """What is published counts for clients once the gateway answers, and is ours once our own applianced is ready."""
        if self._publication is None or not all(member.child.ready for member in self._members):
            return
        text, self._publication = self._on_publication(self._publication), None
        if text:
            self._output.put(text)


def _given_up(child: Child, ended: Ended) -> str:
    why = plain(child.last_words)
    if ended.refused:
        return f"{child.name} cannot start ({ended.words}): {why}" if why else f"{child.name} cannot start ({ended.words})"
    return f"{child.name} ended {QUICK_FAILURES_MAX + 1} times right after its start ({ended.words}); giving up: {why or 'it said nothing'}"


def _under_nohup() -> bool:
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _clock() -> str:
    return time.strftime("%H:%M:%S")
