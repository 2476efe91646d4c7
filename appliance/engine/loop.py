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
from appliance.engine.lane import Lane, Runner
from appliance.engine.messages import EngineStats, FinishReason, GenerateRequest, Likelihood, RequestRefused, TokenOutput
from appliance.engine.references import References, references_of
from appliance.engine.sampler import NoChoice, Tokens, choose
from appliance.engine.scheduler import Chunk, Scheduler
from appliance.engine.sequence import Sequence, Stage
from appliance_kernels.kv_write.reference import ANYBODY, Violation
from appliance_kernels.sample.reference import tokens

log = logging.getLogger("appliance.engine.loop")

EXIT_LOOP_FAILED = 70
"""EX_SOFTWARE of sysexits.h: the supervisor reads the log for the cause and starts the next life."""
_LEAST_CHUNK_TOKENS = 32
"""Of a prefill that is tried again for want of memory: with fewer it is not the prompt's length that takes it."""
_PROMOTED_A_STEP = 4
"""Blocks of finished answers that are copied in a step while others wait for it; a millisecond or two."""
_REFERENCES_S = 1.0
"""How old the blocks' reference counts may be while somebody is being served."""


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
        runner: Runner,
        scheduler: Scheduler,
        limits: EngineLimits,
        threads: int,
        on_fatal: Callable[[BaseException], None] = end_process,
        choose_tokens: Tokens = tokens,
    ) -> None:
        self.limits = limits
        self._vocab_size = runner.vocab_size
        self._shared = Lane(scheduler, runner)
        self._apart: dict[str, Lane] = {}  # by request id
        self._geometry: PoolGeometry = scheduler.pool.geometry
        self._threads = threads
        self._on_fatal = on_fatal
        self._choose_tokens = choose_tokens
        self._inbox: deque[Sequence | _Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._arrivals = 0
        self._living: dict[str, Sequence] = {}
        self._progress = self._prompt_tokens = self._generated_tokens = self._violations = 0
        self._last_step_s = 0.0
        self._decode_launches = 0
        self._references_seen: tuple[float, References] = (-_REFERENCES_S, ())
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
        self._check_integrity()

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
            if not 0 <= token < self._vocab_size:
                raise RequestRefused(f"token id {token} is outside the model's vocabulary of {self._vocab_size} tokens")
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

    def _check_integrity(self) -> None:
        """When nothing runs: the books balance, and nothing was written where nobody writes."""
        self._shared.scheduler.check_integrity()
        self._shared.runner.check_guards()

    def _read_inbox(self) -> bool:
        """Take notes; wait while there is nothing to do. False: stop."""
        with self._wake:
            if not self._inbox and not self._living and not self._stopping:
                self._check_integrity()
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
                self._shared.scheduler.add(note)
        if stopping:
            for sequence in list(self._living.values()):
                self._finish(sequence, FinishReason.ABORT)
        self._stats = self._snapshot()
        return not stopping

    def _step(self) -> None:
        """In each lane at most one chunk of prefill, then one token of everybody who decodes."""
        started_s = time.monotonic()
        for lane in (self._shared, *self._apart.values()):
            self._step_lane(lane)
        self._promote()
        self._last_step_s = time.monotonic() - started_s
        self._stats = self._snapshot()

    def _step_lane(self, lane: Lane) -> None:
        chunks = lane.scheduler.plan_prefill()
        self._stats = self._snapshot()  # a step that never ends is a hang only if it is seen that somebody is being served
        if chunks:
            self._prefill(lane, chunks)
            self._progress += 1
        sequences = lane.scheduler.plan_decode()
        if sequences:
            lane.runner.apply(lane.scheduler.take_moves())
            logits = lane.runner.decode(sequences)
            refused = self._answer_violations(lane)
            rows = [row for row, sequence in enumerate(sequences) if sequence not in refused]
            for row in rows:
                lane.scheduler.decoded(sequences[row])
            if rows:
                self._accept(logits if len(rows) == len(sequences) else logits[rows], [sequences[row] for row in rows])
            self._progress += 1
            self._decode_launches += 1

    def _promote(self) -> None:
        """Answers that were finished become what the next turn of their conversation begins with: a few blocks a step, or all
        when nobody waits."""
        shared = self._shared
        promotions = shared.scheduler.plan_promotion(_PROMOTED_A_STEP if self._living else None)
        if promotions:
            copies = [(one.block.source, one.target, one.block.owner) for one in promotions]
            shared.scheduler.promoted(promotions, shared.runner.promote(copies))
            self._answer_violations(shared)

    def _prefill(self, lane: Lane, chunks: list[Chunk]) -> None:
        """One pass over all chunks; if that fails, one by one, so that only the guilty one is lost."""
        lane.runner.apply(lane.scheduler.take_moves())
        if not self._try_prefill(lane, chunks):
            for chunk in chunks:
                self._try_prefill(lane, [chunk])

    def _try_prefill(self, lane: Lane, chunks: list[Chunk]) -> bool:
        """False: several chunks failed together, and each deserves a try. By then the failed pass has let go of its memory: its
        error, which holds on to it, is gone too."""
        failed = ""
        try:
            logits = lane.runner.prefill(chunks)
        except (MemoryError, RuntimeError) as error:
            failed = f"{type(error).__name__}: {error}"
        if failed and len(chunks) > 1:
            log.warning("Prefill of %d requests together failed, trying them one by one: %s", len(chunks), failed)
            return False
        if failed:
            self._try_smaller(lane, chunks[0], failed)
            return True
        choosing = [chunk.sequence for chunk in chunks if chunk.chooses]
        refused = self._answer_violations(lane)
        for chunk in chunks:
            if chunk.sequence not in refused:
                lane.scheduler.prefilled(chunk)
                self._prompt_tokens += chunk.count
        rows = [row for row, sequence in enumerate(choosing) if sequence not in refused]
        if logits is not None and rows:
            self._accept(logits[rows], [choosing[row] for row in rows])
        return True

    def _answer_violations(self, lane: Lane) -> list[Sequence]:
        """Who would have written or read where it has no business: what was just computed for these is worth nothing. Each is
        computed again apart from everybody, and its client sees a pause; one that is apart already is given up."""
        violations = lane.runner.take_violations()
        if not violations:
            return []
        self._violations += len(violations)
        by_owner = {violation.owner: violation for violation in reversed(violations)}
        if untold := by_owner.pop(ANYBODY, None):
            by_owner = {sequence.arrival: untold for sequence in lane.scheduler if sequence.blocks} | by_owner
        refused = [sequence for sequence in lane.scheduler if sequence.arrival in by_owner]
        for owner in by_owner.keys() - {sequence.arrival for sequence in refused}:
            log.error("KV access refused for a sequence that has ended: %s; please report this", by_owner[owner])
        changed = lane.scheduler.disown(refused) if refused else 0
        for sequence in refused:
            self._set_apart(lane, sequence, by_owner[sequence.arrival], changed)
        return refused

    def _set_apart(self, lane: Lane, sequence: Sequence, violation: Violation, changed: int) -> None:
        request_id = sequence.request.request_id
        where = f"block={violation.block} offset={violation.offset} reason={violation.reason.name.lower()}"
        if lane is self._shared:
            log.error(
                "KV access refused. request=%s %s blocks_corrected=%d tokens=%d: nothing was written, it is computed again on the safe"
                " path; please report this",
                *(request_id, where, changed, len(sequence.token_ids)),
            )
            try:
                self._apart[request_id] = lane.apart(sequence)
                return
            except (OSError, MemoryError) as error:
                log.error("There is no memory for the safe path of request %s: %s: %s", request_id, type(error).__name__, error)
        else:
            log.error("KV access refused on the safe path, request %s is given up: %s; please report this", request_id, where)
        self._finish(sequence, FinishReason.ERROR, error="the engine could not place this answer in its memory; send it again")

    def _try_smaller(self, lane: Lane, chunk: Chunk, failed: str) -> None:
        """Half as many tokens at a time take half the memory, here and for the rest of this prompt; at last it is lost alone."""
        half, request_id = chunk.count // 2, chunk.sequence.request.request_id
        if half < _LEAST_CHUNK_TOKENS:
            self._fail_prefill(chunk, failed)
            return
        log.warning("Prefill of %d tokens of request %s failed, trying %d at a time: %s", chunk.count, request_id, half, failed)
        chunk.sequence.most_chunk_tokens = half
        self._try_prefill(lane, [Chunk(chunk.sequence, chunk.start, half)])

    def _fail_prefill(self, chunk: Chunk, failed: str) -> None:
        sequence = chunk.sequence
        what = f"tokens {chunk.start} to {chunk.start + chunk.count} of a prompt of {sequence.prompt_tokens} tokens"
        log.error("Prefill failed, only request %s is lost: %s: %s", sequence.request.request_id, what, failed)
        kind = failed.partition(":")[0]
        text = f"the engine could not process {what} ({kind}, most likely too little memory); send a shorter one, or later"
        self._finish(sequence, FinishReason.ERROR, error=text)

    def _accept(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Choose a token for each, hand it out, end those that are done."""
        for sequence, choice in zip(sequences, choose(logits, sequences, self._choose_tokens), strict=True):
            if isinstance(choice, NoChoice):
                self._fail_choice(sequence, choice)
                continue
            self._generated_tokens += 1
            if choice.token in sequence.request.sampling.stop_token_ids:
                self._finish(sequence, FinishReason.STOP)
                continue
            sequence.token_ids.append(choice.token)
            constraint, output = sequence.request.constraint, (choice.token,)
            if constraint is not None:
                constraint.take(choice.token)
            if constraint is not None and constraint.complete:
                self._finish(sequence, FinishReason.STOP, output, likelihoods=choice.likelihoods)
            elif sequence.answer_tokens >= sequence.request.sampling.max_new_tokens:
                self._finish(sequence, FinishReason.LENGTH, output, likelihoods=choice.likelihoods)
            else:
                sequence.give_out(output, likelihoods=choice.likelihoods)

    def _fail_choice(self, sequence: Sequence, choice: NoChoice) -> None:
        request_id, count = sequence.request.request_id, len(sequence.token_ids)
        if choice.not_finite:
            log.error("The model's logits after %d tokens of request %s are not finite.", count, request_id)
        else:
            log.warning("There is no next token after %d tokens of request %s: %s.", count, request_id, choice.why)
        self._finish(sequence, FinishReason.ERROR, error=choice.why, hopeless=not choice.not_finite)
        if choice.not_finite:
            self._shared.scheduler.cache.forget(sequence.digests)  # should it have been chance, it is not to last

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        error: str | None = None,
        likelihoods: tuple[Likelihood, ...] = (),
        hopeless: bool = False,
    ) -> None:
        scheduler = self._apart.pop(sequence.request.request_id, self._shared).scheduler
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            scheduler.retire(sequence)
        else:
            scheduler.remove(sequence)
        assert sequence.stage is Stage.FINISHED
        del self._living[sequence.request.request_id]
        sequence.give_out(token_ids, reason, error, likelihoods, hopeless)

    def _snapshot(self) -> EngineStats:
        lanes = (self._shared, *self._apart.values())
        return EngineStats(
            progress=self._progress,
            running=sum(lane.scheduler.running for lane in lanes),
            waiting=sum(lane.scheduler.waiting for lane in lanes) + len(self._inbox),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._shared.scheduler.preemptions,
            kv_blocks_total=self._geometry.total_blocks,
            kv_blocks_used=self._shared.scheduler.pool.used_blocks,
            last_step_s=self._last_step_s,
            block_violations=self._violations,
            cached_tokens=self._shared.scheduler.cached_tokens,
            kv_blocks_kept=self._shared.scheduler.pool.kept_blocks,
            swaps=self._shared.scheduler.swaps,
            evictions=self._shared.scheduler.cache.evictions,
            decode_launches=self._decode_launches,
            block_references=self._references(),
        )

    def _references(self) -> References:
        """Looked up once a second and when all is done: on a card it is a wait."""
        now_s = time.monotonic()
        if not self._living or now_s - self._references_seen[0] >= _REFERENCES_S:
            self._references_seen = now_s, references_of(self._shared.scheduler.pool.words, self._geometry)
        return self._references_seen[1]
