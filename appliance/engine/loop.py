"""The engine's thread: takes requests in, runs prefill and decode steps in turn, hands tokens out.

Only this thread touches the scheduler, the cache and the model. Others leave notes in the inbox and read the last snapshot.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from appliance.core.launch import EngineLimits
from appliance.engine.block_pool import PoolGeometry
from appliance.engine.messages import EngineStats, FinishReason, GenerateRequest, RequestRefused, TokenOutput
from appliance.engine.runner import ModelRunner
from appliance.engine.sampler import NotFinite, choose
from appliance.engine.scheduler import Chunk, Scheduler
from appliance.engine.sequence import Sequence, Stage

log = logging.getLogger("appliance.engine.loop")

EXIT_LOOP_FAILED = 70
"""EX_SOFTWARE of sysexits.h: the supervisor reads the log for the cause and starts the next life."""


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


def end_process(error: BaseException) -> None:
    """The engine's state cannot be trusted any more: say why, end at once; the supervisor does the rest."""
    log.critical("Engine loop failed: %s: %s", type(error).__name__, error)
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    logging.shutdown()
    os._exit(EXIT_LOOP_FAILED)


class EngineLoop:
    """Implements messages.Engine.

    Attributes:
        limits: as published.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        limits: EngineLimits,
        threads: int,
        on_fatal: Callable[[BaseException], None] = end_process,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._scheduler = scheduler
        self._geometry: PoolGeometry = scheduler.pool.geometry
        self._threads = threads
        self._on_fatal = on_fatal
        self._inbox: deque[Sequence | _Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._arrivals = 0
        self._living: dict[str, Sequence] = {}
        self._progress = self._prompt_tokens = self._generated_tokens = 0
        self._last_step_s = 0.0
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Begin to serve what is submitted."""
        self._thread.start()

    def run_until_idle(self) -> None:
        """Serve all that was submitted in the caller's thread, instead of `start`: for tests and benchmarks."""
        with torch.inference_mode():
            while self._inbox or self._living:
                self._read_inbox()
                self._step()
        self._scheduler.check_integrity()

    def stop(self) -> None:
        """End after the current step; what still runs is aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, request: GenerateRequest, on_output: Callable[[TokenOutput], None]) -> None:
        """Queue a request; see messages.Engine."""
        self._check(request)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
        with self._wake:
            if self._stopping:
                raise RequestRefused("the engine is stopping and takes no more requests")
            self._arrivals += 1
            self._inbox.append(Sequence(request, on_output, self._arrivals, seed, [*request.prompt_ids, *request.answer_ids]))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Drop a request; see messages.Engine."""
        with self._wake:
            self._inbox.append(_Abort(request_id))
            self._wake.notify()

    def stats(self) -> EngineStats:
        """The snapshot after the last step."""
        return self._stats

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what could never finish, even alone."""
        prompt, answer = len(request.prompt_ids), request.sampling.max_new_tokens
        context, prompt_room = self.limits.context_length_tokens, self._geometry.prefill_tokens
        # The last token is sent and never read back; the prompt's tail is copied in front of the answer.
        answer_room = self._geometry.decode_tokens - prompt % self._geometry.block_tokens + 1
        if prompt < 1 or answer < 1:
            raise RequestRefused(f"a request needs at least 1 prompt token and 1 new token; this one has {prompt} and {answer}")
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < self._runner.vocab_size:
                raise RequestRefused(f"token id {token} is outside the model's vocabulary of {self._runner.vocab_size} tokens")
        if prompt + answer > context:
            raise RequestRefused(
                f"{prompt} prompt tokens + {answer} new tokens = {prompt + answer} exceed the context of {context} tokens;"
                f" at most {max(0, context - prompt)} new tokens fit this prompt"
            )
        if prompt > prompt_room:
            raise RequestRefused(
                f"{prompt} prompt tokens exceed the {prompt_room} that the KV cache keeps for prompts; shorten the prompt,"
                " or raise [engine] kv_pool_bytes or prefill_fraction"
            )
        if answer > answer_room:
            raise RequestRefused(
                f"{answer} new tokens exceed the {answer_room} that the KV cache keeps for the answer to this prompt; ask for fewer,"
                " or raise [engine] kv_pool_bytes or lower prefill_fraction"
            )

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._read_inbox():
                    self._step()
        except BaseException as error:  # noqa: BLE001  # the top of a thread: nothing above it would hear of this
            self._on_fatal(error)

    def _read_inbox(self) -> bool:
        """Take notes; wait while there is nothing to do. False: stop."""
        with self._wake:
            if not self._inbox and not self._living and not self._stopping:
                self._scheduler.check_integrity()
                self._wake.wait_for(lambda: self._inbox or self._stopping)
            notes, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for note in notes:
            if isinstance(note, _Abort):
                if note.request_id in self._living:
                    self._finish(self._living[note.request_id], FinishReason.ABORT)
            elif note.request.request_id in self._living:
                error = f"request id {note.request.request_id} is in use by a request that is not finished"
                note.on_output(TokenOutput(note.request.request_id, finish=FinishReason.ERROR, error=error))
            else:
                self._living[note.request.request_id] = note
                self._scheduler.add(note)
        if stopping:
            for sequence in list(self._living.values()):
                self._finish(sequence, FinishReason.ABORT)
        self._stats = self._snapshot()
        return not stopping

    def _step(self) -> None:
        """At most one chunk of prefill, then one token of everybody who decodes."""
        started_s = time.monotonic()
        chunks = self._scheduler.plan_prefill()
        self._stats = self._snapshot()  # a step that never ends is a hang only if it is seen that somebody is being served
        if chunks:
            self._prefill(chunks)
            self._progress += 1
        sequences = self._scheduler.plan_decode()
        if sequences:
            self._runner.apply(self._scheduler.take_moves())
            logits = self._runner.decode(sequences)
            for sequence in sequences:
                self._scheduler.decoded(sequence)
            self._accept(logits, sequences)
            self._progress += 1
        self._last_step_s = time.monotonic() - started_s
        self._stats = self._snapshot()

    def _prefill(self, chunks: list[Chunk]) -> None:
        """One pass over all chunks; if that fails, one by one, so that only the guilty one is lost."""
        self._runner.apply(self._scheduler.take_moves())
        if not self._try_prefill(chunks):
            for chunk in chunks:
                self._try_prefill([chunk])

    def _try_prefill(self, chunks: list[Chunk]) -> bool:
        """False: several chunks failed together, and each deserves a try; by then the failed pass has let go of its memory."""
        try:
            logits = self._runner.prefill(chunks)
        except (MemoryError, RuntimeError) as error:
            if len(chunks) > 1:
                log.warning("Prefill of %d requests together failed, trying them one by one: %s", len(chunks), error)
                return False
            self._fail_prefill(chunks[0], error)
            return True
        choosing = [chunk.sequence for chunk in chunks if chunk.chooses]
        for chunk in chunks:
            self._scheduler.prefilled(chunk)
            self._prompt_tokens += chunk.count
        if logits is not None:
            self._accept(logits, choosing)
        return True

    def _fail_prefill(self, chunk: Chunk, error: MemoryError | RuntimeError) -> None:
        sequence = chunk.sequence
        what = f"tokens {chunk.start} to {chunk.start + chunk.count} of a prompt of {sequence.prompt_tokens} tokens"
        log.error("Prefill failed, only request %s is lost: %s: %s: %s", sequence.request.request_id, what, type(error).__name__, error)
        text = f"the engine could not process {what} ({type(error).__name__}, most likely too little memory); send a shorter one, or later"
        self._finish(sequence, FinishReason.ERROR, error=text)

    def _accept(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Choose a token for each, hand it out, end those that are done."""
        try:
            tokens = choose(logits, sequences)
        except NotFinite as error:
            for sequence in error.sequences:
                count = len(sequence.token_ids)
                log.error("The model's logits after %d tokens of request %s are not finite.", count, sequence.request.request_id)
                text = f"the model gave no usable numbers after {count} tokens (NaN or infinity)"
                self._finish(sequence, FinishReason.ERROR, error=text)
            kept = [row for row, sequence in enumerate(sequences) if sequence not in error.sequences]
            if kept:
                self._accept(logits[kept], [sequences[row] for row in kept])
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            self._generated_tokens += 1
            if token in sequence.request.sampling.stop_token_ids:
                self._finish(sequence, FinishReason.STOP)
                continue
            sequence.token_ids.append(token)
            if sequence.answer_tokens >= sequence.request.sampling.max_new_tokens:
                self._finish(sequence, FinishReason.LENGTH, (token,))
            else:
                sequence.on_output(TokenOutput(sequence.request.request_id, (token,)))

    def _finish(self, sequence: Sequence, reason: FinishReason, token_ids: tuple[int, ...] = (), error: str | None = None) -> None:
        self._scheduler.remove(sequence)
        assert sequence.stage is Stage.FINISHED
        del self._living[sequence.request.request_id]
        sequence.on_output(TokenOutput(sequence.request.request_id, token_ids, reason, error=error))

    def _snapshot(self) -> EngineStats:
        return EngineStats(
            progress=self._progress,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + len(self._inbox),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._scheduler.preemptions,
            kv_blocks_total=self._geometry.total_blocks,
            kv_blocks_used=self._scheduler.pool.used_blocks,
            last_step_s=self._last_step_s,
        )
