"""An Engine that says what it was told to: the seam of appliance/engine/messages.py in a thread, without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from appliance.core.launch import EngineLimits
from appliance.engine.messages import EngineStats, FinishReason, GenerateRequest, Likelihood, RequestRefused, TokenOutput

Script = Callable[[GenerateRequest], Sequence[int]]


def echo(request: GenerateRequest) -> Sequence[int]:
    """The prompt, over and over."""
    times = request.sampling.max_new_tokens // len(request.prompt_ids) + 1
    return (request.prompt_ids * times)[: request.sampling.max_new_tokens]


class ScriptedEngine:
    """Continues each prompt by `script(request)`, one token an output, and honours stop tokens, length and aborts.

    Of an answer that has begun already, only the rest is given out.

    Attributes:
        submitted: requests in the order of their submission.
        aborted: ids of the running requests that were aborted.
        gate: while it is cleared, no token comes.
        fail_after: with a number, each answer ends in an ERROR after so many tokens.
        hopeless: such an error is the request's own.
    """

    def __init__(self, script: Script = echo, *, context: int = 256, step_s: float = 0.0, model_id: str = "tiny") -> None:
        self.limits = EngineLimits(model_id=model_id, context_length_tokens=context, max_running=4, kv_tokens=4 * context)
        self.script = script
        self.step_s = step_s
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_after: int | None = None
        self.hopeless = False
        self.refuse: str | None = None
        self.produced = 0
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def submit(self, request: GenerateRequest, on_output: Callable[[TokenOutput], None]) -> None:
        """A thread an answer."""
        if self.refuse is not None:
            raise RequestRefused(self.refuse)
        stopped = threading.Event()
        with self._lock:
            self.submitted.append(request)
            self._running[request.request_id] = stopped
        threading.Thread(target=self._answer, args=(request, on_output, stopped), daemon=True).start()

    def abort(self, request_id: str) -> None:
        """Takes effect before the next token."""
        with self._lock:
            stopped = self._running.get(request_id)
            if stopped is not None:
                self.aborted.append(request_id)
                stopped.set()

    def stats(self) -> EngineStats:
        """Counts tokens as steps."""
        running = len(self._running)
        references = ((0, 64 - running), (1, running))
        return EngineStats(
            self.produced, running, 0, 0, self.produced, 0, 64, running, 0.001, decode_launches=self.produced, block_references=references
        )

    @property
    def running(self) -> int:
        """Answers in progress."""
        return len(self._running)

    def _answer(self, request: GenerateRequest, on_output: Callable[[TokenOutput], None], stopped: threading.Event) -> None:
        finish = self._tokens(request, on_output, stopped)
        with self._lock:
            del self._running[request.request_id]
        error = "the prompt of 3 tokens needs 1 GiB and 2 MiB are free" if finish is FinishReason.ERROR else None
        on_output(TokenOutput(request.request_id, finish=finish, error=error, hopeless=self.hopeless))

    def _tokens(self, request: GenerateRequest, on_output: Callable[[TokenOutput], None], stopped: threading.Event) -> FinishReason:
        known = len(request.answer_ids)
        for index, token_id in enumerate(self.script(request)[known:], known):
            while not self.gate.wait(0.01) and not stopped.is_set():
                pass
            if stopped.is_set():
                return FinishReason.ABORT
            if index == self.fail_after:
                return FinishReason.ERROR
            if token_id in request.sampling.stop_token_ids:
                return FinishReason.STOP
            time.sleep(self.step_s)
            self.produced += 1
            of_prompt = () if index > known else _of_prompt(request)
            of_token = _likelihoods(request, token_id, index)
            on_output(TokenOutput(request.request_id, (token_id,), likelihoods=of_token, prompt_likelihoods=of_prompt))
            if index + 1 == request.sampling.max_new_tokens:
                return FinishReason.LENGTH
        return FinishReason.STOP


def _likelihoods(request: GenerateRequest, token_id: int, index: int) -> tuple[Likelihood, ...]:
    """Where they are asked for: −0.25 for the first token, −0.5 for the second and so on, and the next ids as the runners-up."""
    count = request.sampling.logprobs
    if count is None:
        return ()
    logprob = -0.25 * (index + 1)
    return (Likelihood(logprob, tuple((token_id + other, logprob - other) for other in range(count))),)


def _of_prompt(request: GenerateRequest) -> tuple[Likelihood, ...]:
    """Where they are asked for: −1 for the second token, −2 for the third and so on."""
    count = request.sampling.prompt_logprobs
    if count is None:
        return ()
    return tuple(
        Likelihood(-float(index), tuple((token_id + other, -float(index) - other) for other in range(count)))
        for index, token_id in enumerate(request.prompt_ids[1:], 1)
    )
