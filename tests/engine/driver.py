"""The real engine in the test's own thread, with every row of logits it chose a token from kept."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from appliance.engine.block_pool import BlockPool
from appliance.engine.build import load_parts
from appliance.engine.loop import EngineLoop
from appliance.engine.messages import FinishReason, GenerateRequest, SamplingParams, TokenOutput
from appliance.engine.runner import ModelRunner
from appliance.engine.scheduler import BlockMoves, Chunk
from appliance.engine.sequence import Sequence
from appliance.engine.settings import EngineSettings
from appliance_kernels.kv_write.reference import ANYBODY, Violation

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By the position of the token that was chosen from them."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    hopeless: bool = False

    def take(self, output: TokenOutput) -> None:
        """One output; nothing may follow a finish."""
        assert self.finish is None, "an output after the end"
        self.token_ids += output.token_ids
        self.finish, self.error, self.cached_tokens = output.finish, output.error, output.cached_tokens
        self.hopeless = output.hopeless


class RecordingRunner:
    """Stands between the loop and the runner; keeps logits, and fails where a test wants it to."""

    def __init__(self, runner: ModelRunner, answers: dict[str, Answer]) -> None:
        self._runner = runner
        self._answers = answers
        self.batches: list[int] = []
        self.chunks: list[list[int]] = []
        self.fail_prefill_of: dict[str, Exception] = {}
        self.vocab_size = runner.vocab_size
        self.lanes: list[RecordingRunner] = []
        self._last: list[tuple[int, int]] = []
        self._by_arrival: dict[int, Answer] = {}

    def beside(self, pool: BlockPool) -> RecordingRunner:
        """Its answers are kept in the same place."""
        other = RecordingRunner(self._runner.beside(pool), self._answers)
        self.lanes.append(other)
        return other

    def take_violations(self) -> list[Violation]:
        """What was chosen from the logits of a refused step is nothing: it is forgotten."""
        violations = self._runner.take_violations()
        for violation in violations:
            for owner, position in self._last:
                if violation.owner in (owner, ANYBODY):
                    self._by_arrival[owner].logits.pop(position, None)
        return violations

    def check_guards(self) -> None:
        self._runner.check_guards()

    def promote(self, copies: Several[tuple[int, int, int]]) -> bool:
        return self._runner.promote(copies)

    def apply(self, moves: BlockMoves) -> None:
        self._runner.apply(moves)

    def prefill(self, chunks: Several[Chunk]) -> Tensor | None:
        self.chunks.append([chunk.count for chunk in chunks])
        for chunk in chunks:
            if chunk.sequence.request.request_id in self.fail_prefill_of:
                raise self.fail_prefill_of[chunk.sequence.request.request_id]
        logits = self._runner.prefill(chunks)
        self._keep(logits, [chunk.sequence for chunk in chunks if chunk.chooses])
        return logits

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        self.batches.append(len(sequences))
        logits = self._runner.decode(sequences)
        self._keep(logits, sequences)
        return logits

    def _keep(self, logits: Tensor | None, sequences: Several[Sequence]) -> None:
        self._last = [(sequence.arrival, len(sequence.token_ids)) for sequence in sequences]
        for row, sequence in enumerate(sequences):
            assert logits is not None
            self._by_arrival[sequence.arrival] = self._answers[sequence.request.request_id]
            kept = self._answers[sequence.request.request_id].logits
            assert len(sequence.token_ids) not in kept, "a token was chosen twice"
            kept[len(sequence.token_ids)] = logits[row].clone()


class Driver:
    """An engine over one model folder; see the module.

    Attributes:
        check_each_step: after every step the books balance, and nothing was written where nobody writes; else only when nothing runs.
    """

    def __init__(self, model: Path, **settings: object) -> None:
        parts = load_parts(replace(EngineSettings(model, threads=2, kv_pool_bytes=256 * 1024**2), **settings))  # type: ignore[arg-type]
        self.answers: dict[str, Answer] = {}
        self.runner = RecordingRunner(parts.runner, self.answers)
        self.loop = EngineLoop(self.runner, parts.scheduler, parts.limits, parts.threads)  # type: ignore[arg-type]
        self.check_each_step = True
        step = self.loop._step

        def checked() -> None:
            step()
            if self.check_each_step:
                self.loop._check_integrity()

        self.loop._step = checked  # type: ignore[method-assign]

    def submit(self, name: str, prompt_ids: Several[int], sampling: SamplingParams = GREEDY, answer_ids: Several[int] = ()) -> Answer:
        """Queue one request under a name of the test's."""
        answer = self.answers[name] = Answer()
        self.loop.submit(GenerateRequest(name, tuple(prompt_ids), sampling, tuple(answer_ids)), answer.take)
        return answer

    def run(self, prompts: dict[str, list[int]], sampling: SamplingParams = GREEDY) -> dict[str, Answer]:
        """All of them at once, to the end."""
        answers = {name: self.submit(name, prompt, sampling) for name, prompt in prompts.items()}
        self.loop.run_until_idle()
        return answers

    def alone(self, prompts: dict[str, list[int]], sampling: SamplingParams = GREEDY) -> dict[str, Answer]:
        """One after the other, each with the engine to itself."""
        return {name: self.run({name: prompt}, sampling)[name] for name, prompt in prompts.items()}


def differences(one: dict[str, Answer], other: dict[str, Answer]) -> list[str]:
    """Where tokens differ, or any bit of any logit; empty when nowhere."""
    found = []
    for name in one:
        a, b = one[name], other[name]
        if a.token_ids != b.token_ids:
            found.append(f"{name}: tokens {a.token_ids} != {b.token_ids}")
        if a.logits.keys() != b.logits.keys():
            found.append(f"{name}: logits at {sorted(a.logits)} != {sorted(b.logits)}")
        for position in a.logits.keys() & b.logits.keys():
            if not torch.equal(a.logits[position], b.logits[position]):
                gap = (a.logits[position] - b.logits[position]).abs().max().item()
                found.append(f"{name}: logits at position {position} differ by up to {gap:.1e}")
    return found
