"""The kernel's log for several who listen: it can be read once only, for what one has read the other does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.gpu.kernel_line import KernelLine
from appliance.gpu.kernel_log import KernelLog

Listen = Callable[[Sequence[KernelLine]], None]


class KernelEars:
    """Owns the log; it is opened when the first ear starts. Every ear hears every line, those too that were read before it listened."""

    def __init__(self, log: KernelLog) -> None:
        self.log = log
        self._ears: list[KernelEar] = []
        self._started = False

    def ear(self) -> KernelEar:
        """One more."""
        self._ears.append(KernelEar(self))
        return self._ears[-1]

    def start(self) -> None:
        """Open the log, unless it is."""
        if not self._started:
            self._started = True
            self.log.start(self._hear)

    def without(self, ear: KernelEar) -> None:
        """One less."""
        if ear in self._ears:
            self._ears.remove(ear)

    def stop(self) -> None:
        """Give the log back."""
        self.log.stop()

    def _hear(self, lines: Sequence[KernelLine]) -> None:
        for ear in tuple(self._ears):
            ear.hear(lines)


class KernelEar:
    """One listener's. What comes before it starts is kept for it."""

    def __init__(self, ears: KernelEars) -> None:
        self._ears = ears
        self._kept: list[KernelLine] = []
        self._listen: Listen | None = None

    @property
    def boot_id(self) -> str | None:
        """Names this boot."""
        return self._ears.log.boot_id

    @property
    def is_of_this_boot(self) -> bool:
        """See KernelLog."""
        return self._ears.log.is_of_this_boot

    @property
    def problem(self) -> str | None:
        """Why nothing can be heard; None where something can."""
        return self._ears.log.problem

    def start(self, listen: Listen) -> None:
        """Begin with what the log holds already (replayed), then call back for each new batch."""
        self._listen = listen
        self._ears.start()
        kept, self._kept = self._kept, []
        if kept:
            listen(kept)

    def hear(self, lines: Sequence[KernelLine]) -> None:
        """A batch."""
        if self._listen is None:
            self._kept += lines
        else:
            self._listen(lines)

    def drain(self) -> None:
        """Read what is there now: a verdict stands on all that the kernel has said."""
        self._ears.log.drain()

    def stop(self) -> None:
        """Hear no more."""
        self._listen = None
        self._ears.without(self)
