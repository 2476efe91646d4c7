"""`python -m appliance.engine.stress`: work the engine in every shape for a while, and judge it. `appliancectl stress` starts it.

Rounds of random requests in a pool that is too small for them: lengths, chunks of what others begin with, sampling, clients that
leave. After each round nothing may be held, the books must balance and nothing may be written where nobody writes. One request is
asked again in every round, and now and then one of the round's by itself: each must give the same tokens, whatever ran beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.core.errors import ApplianceError
from appliance.engine.messages import FinishReason, GenerateRequest, SamplingParams, TokenOutput
from appliance.engine.settings import DEVICES, WEIGHTS_DTYPES, EngineSettings

if TYPE_CHECKING:
    from appliance.engine.loop import EngineLoop

EXIT_FAILED = 1
EXIT_CANNOT = 2
MOST_GROWTH_BYTES = 64 * 1024**2
"""Of the process, and of its memory on a card, from the end of the warm-up to the end of all: more is a leak."""
_WARM_UP_ROUNDS = 3
_SAY_EVERY_S = 10.0
_MOST_PROMPT_TOKENS, _MOST_NEW_TOKENS = 300, 48
_PROBE_TOKENS = 24
_POOL_TOKENS, _PROMPTS_SHARE, _SWAP_TOKENS = 1000, 0.8, 40
"""Of the KV cache: each request fits alone, eight of them do not; and not every answer that gives way finds room to be set aside."""


@dataclass(slots=True)
class Report:
    """What was done and found; `faults` are sentences, and none is a pass."""

    rounds: int = 0
    requests: int = 0
    tokens: int = 0
    aborted: int = 0
    compared: int = 0
    preemptions: int = 0
    swaps: int = 0
    evictions: int = 0
    cached_tokens: int = 0
    grown_bytes: int = 0
    card_grown_bytes: int = 0
    elapsed_s: float = 0.0
    first_tokens_per_s: float = 0.0
    last_tokens_per_s: float = 0.0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a round; `leaves_after` tokens its client goes away (0: it stays)."""

    request: GenerateRequest
    leaves_after: int = 0


def draw_round(draw: random.Random, number: int, vocab_size: int) -> list[Asked]:
    """Requests of every shape; some begin alike."""
    shared = _ids(draw, vocab_size, draw.randint(1, _MOST_PROMPT_TOKENS // 2))
    asked = []
    for index in range(draw.randint(1, 16)):
        ids = (shared if draw.random() < 0.4 else ()) + _ids(draw, vocab_size, draw.randint(1, _MOST_PROMPT_TOKENS // 2))
        greedy = draw.random() < 0.5
        sampling = SamplingParams(
            max_new_tokens=draw.randint(1, _MOST_NEW_TOKENS),
            temperature=0.0 if greedy else draw.uniform(0.2, 1.5),
            top_k=0 if greedy else draw.choice((0, 1, 40)),
            top_p=1.0 if greedy else draw.choice((1.0, 0.9)),
            seed=draw.getrandbits(32),
            repetition_penalty=draw.choice((1.0, 1.0, 1.2)),
        )
        leaves = draw.randint(1, sampling.max_new_tokens) if draw.random() < 0.15 else 0
        asked.append(Asked(GenerateRequest(f"{number}.{index}", ids, sampling), leaves))
    return asked


def _ids(draw: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab_size) for _ in range(count))


class Stress:
    """Owns an engine in this thread, and the report."""

    def __init__(self, loop: EngineLoop, vocab_size: int, seed: int) -> None:
        self.report = Report()
        self._loop = loop
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)
        probe = _ids(random.Random(0), vocab_size, _PROBE_TOKENS)
        self._probe = SamplingParams(max_new_tokens=_PROBE_TOKENS, temperature=0.0, seed=0)
        self._probe_ids = probe
        self._expected = self._alone("probe", probe, self._probe)
        self._rates: list[float] = []

    def run(self, until_s: float, say: Callable[[str], None]) -> Report:
        """Rounds until then, at least as many as it takes to warm up and one more; ends at the first fault."""
        started_s = said_s = time.monotonic()
        report, host_bytes, card_bytes = self.report, 0, 0
        while report.rounds <= _WARM_UP_ROUNDS or time.monotonic() < until_s:
            self._round()
            if report.rounds == _WARM_UP_ROUNDS:
                host_bytes, card_bytes = _anonymous_bytes(), _card_bytes()
            if report.faults:
                break
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"{report.rounds} rounds, {report.requests} requests, {report.preemptions} preemptions, no fault so far")
        report.elapsed_s = time.monotonic() - started_s
        if host_bytes:
            report.grown_bytes, report.card_grown_bytes = _anonymous_bytes() - host_bytes, _card_bytes() - card_bytes
        for whose, grown_bytes in (("the process", report.grown_bytes), ("its memory on the card", report.card_grown_bytes)):
            if grown_bytes > MOST_GROWTH_BYTES:
                report.faults.append(f"{whose} grew by {grown_bytes} bytes after its first {_WARM_UP_ROUNDS} rounds")
        if self._rates:
            part = max(1, len(self._rates) // 10)
            report.first_tokens_per_s = round(statistics.median(self._rates[:part]), 1)
            report.last_tokens_per_s = round(statistics.median(self._rates[-part:]), 1)
        return report

    def _round(self) -> None:
        """All at once with the probe among them; then the books, the counters, and one again by itself."""
        report, number = self.report, self.report.rounds + 1
        asked = draw_round(self._draw, number, self._vocab_size)
        answers: dict[str, list[int]] = {}
        finishes: dict[str, FinishReason | None] = {}
        before, started_s = self._loop.stats().generated_tokens, time.monotonic()
        for one in (Asked(GenerateRequest("probe", self._probe_ids, self._probe)), *asked):
            self._submit(one, answers, finishes)
        try:
            self._loop.run_until_idle()  # checks the books and the places that nobody writes
        except AssertionError as error:
            report.faults.append(f"round {number}: {error}")
            return
        stats = self._loop.stats()
        self._rates.append((stats.generated_tokens - before) / max(time.monotonic() - started_s, 1e-9))
        report.rounds, report.requests = number, report.requests + len(asked)
        report.tokens, report.preemptions, report.swaps = stats.generated_tokens, stats.preemptions, stats.swaps
        report.evictions, report.cached_tokens = stats.evictions, stats.cached_tokens
        self._judge(number, asked, answers, finishes)

    def _submit(self, one: Asked, answers: dict[str, list[int]], finishes: dict[str, FinishReason | None]) -> None:
        name = one.request.request_id
        tokens = answers.setdefault(name, [])

        def take(output: TokenOutput) -> None:
            tokens.extend(output.token_ids)
            finishes[name] = output.finish
            if one.leaves_after and output.finish is None and len(tokens) >= one.leaves_after:
                self._loop.abort(name)

        self._loop.submit(one.request, take)

    def _judge(self, number: int, asked: Sequence[Asked], answers: dict[str, list[int]], finishes: dict[str, FinishReason | None]) -> None:
        report, stats = self.report, self._loop.stats()
        faults = [f"request {name} ended as {finish}" for name, finish in finishes.items() if finish in (None, FinishReason.ERROR)]
        if stats.kv_blocks_used or stats.running or stats.waiting:
            faults.append(f"{stats.kv_blocks_used} blocks, {stats.running} running and {stats.waiting} waiting are left when nothing runs")
        if stats.block_violations:
            faults.append(f"{stats.block_violations} accesses to KV blocks were refused")
        report.aborted += sum(finish is FinishReason.ABORT for finish in finishes.values())
        if answers["probe"] != self._expected:
            faults.append(f"the same request gave {answers['probe']}, at first it gave {self._expected}")
        staying = [one for one in asked if not one.leaves_after]
        if staying and not faults:
            again = self._draw.choice(staying).request
            alone = self._alone(f"{again.request_id} alone", again.prompt_ids, again.sampling)
            report.compared += 1
            if alone != answers[again.request_id]:
                faults.append(f"request {again.request_id} gave {answers[again.request_id]} among others and {alone} by itself")
        report.faults += [f"round {number}: {fault}" for fault in faults]

    def _alone(self, name: str, ids: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        answers: dict[str, list[int]] = {}
        self._submit(Asked(GenerateRequest(name, ids, sampling)), answers, {})
        self._loop.run_until_idle()
        return answers[name]


def _anonymous_bytes() -> int:
    """Memory of this process alone."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def _card_bytes() -> int:
    """What torch's tensors take on the card; 0 without one."""
    import torch

    return torch.cuda.memory_allocated()


def verdict(report: Report) -> str:
    """One sentence."""
    if report.faults:
        return f"FAILED after {report.rounds} rounds: {report.faults[0]}"
    return (
        f"passed: {report.rounds} rounds in {report.elapsed_s:.0f} s, {report.requests} requests, {report.tokens} tokens, "
        f"{report.preemptions} preemptions, {report.compared} answers equal by themselves, {report.aborted} clients left"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the report is one line of JSON on stdout, words go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m appliance.engine.stress", description="Soak the engine and judge it.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--weights-dtype", choices=WEIGHTS_DTYPES, default="float32")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)  # engine/faults.py: to see that it is found
    told = parser.parse_args(arguments)
    kind, _, step = told.fault.partition("@")
    settings = EngineSettings(
        told.model, threads=told.threads, block_tokens=told.block_tokens, weights_dtype=told.weights_dtype, device=told.device,
        prefill_chunk_tokens=96, prefill_fraction=_PROMPTS_SHARE, fault=(kind, int(step)) if kind else None,
    )  # fmt: skip
    try:
        report = _stress(settings, told.seconds, told.seed)
    except ApplianceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CANNOT
    print(verdict(report), file=sys.stderr)
    print(json.dumps(asdict(report) | {"passed": not report.faults}))
    return EXIT_FAILED if report.faults else 0


def _stress(settings: EngineSettings, seconds: float, seed: int) -> Report:
    from appliance.engine.threads import settle_openmp

    settle_openmp()
    from appliance.engine.build import cache_dtype, load_parts
    from appliance.engine.kv_cache import bytes_per_token
    from appliance.engine.loop import EngineLoop
    from appliance.engine.models.registry import read_config
    from appliance.engine.weights import read_config_json

    token_bytes = bytes_per_token(read_config(read_config_json(settings.model_path)), cache_dtype(settings))
    parts = load_parts(replace(settings, kv_pool_bytes=_POOL_TOKENS * token_bytes, swap_bytes=_SWAP_TOKENS * token_bytes))
    loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads, choose_tokens=parts.choose_tokens)
    return Stress(loop, parts.runner.vocab_size, seed).run(
        time.monotonic() + seconds, lambda words: print(words, file=sys.stderr, flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())
