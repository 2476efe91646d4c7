"""The engine's path for cards beside the CPU's, as JSON:
`python tests/engine/card_path.py MODEL_DIR (interpreter | cuda) [damaged | float16 | bfloat16]`.

With a 16-bit type the card is told the CPU's tokens, whatever it would have chosen, and its logits are compared.

`interpreter`: every operation is its Triton kernel in Triton's interpreter, on a pretended card (pretend_card.py). A process of its own:
the interpreter is chosen when a kernel's module is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass, field
from pathlib import Path

if sys.argv[2:3] == ["interpreter"]:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from appliance.engine.build import load_parts
from appliance.engine.card import build_on_card, open_card
from appliance.engine.card_runner import CardRunner
from appliance.engine.kv_cache import bytes_per_token
from appliance.engine.loop import EngineLoop
from appliance.engine.messages import GenerateRequest, SamplingParams, TokenOutput
from appliance.engine.models.registry import read_config
from appliance.engine.scheduler import Scheduler
from appliance.engine.sequence import Sequence
from appliance.engine.settings import EngineSettings
from appliance.engine.weights import ModelWeights, read_config_json
from appliance_kernels.on_card import OnCard
from appliance_kernels.sample.reference import Draw, tokens
from tests.engine.pretend_card import CARD, PretendCard
from tests.kernels.whole_products import whole_products

NEW_TOKENS = 4
BLOCK_TOKENS = 4
PROMPT_BLOCKS, ANSWER_BLOCKS = 7, 3
"""So few that one of two answers has to give way."""
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
DRAWN = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, top_k=40, top_p=0.9, seed=7)
PENALISED = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, presence_penalty=1.5, logprobs=2, prompt_logprobs=2)


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None
    judged: int = 0
    """Tokens of the prompt of which it was said how likely they are."""

    def take(self, output: TokenOutput) -> None:
        """One output."""
        self.token_ids += output.token_ids
        self.judged += len(output.prompt_likelihoods)
        self.cached_tokens, self.error = output.cached_tokens, output.error


class DamagedRunner(CardRunner):
    """Spoils the first sequence's block table once, at its second decode step."""

    steps = 0

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        """As ever, but for that step."""
        type(self).steps += 1
        if type(self).steps == 2:
            sequences[0].prompt_blocks[0] = 1_000_000
        return super().decode(sequences)


@dataclass
class Told:
    """Of one engine.

    Attributes:
        answers: of two prompts at once, the second turn of the first one, one with a penalty.
        violations: accesses that were refused.
        preemptions, swaps: of the two.
    """

    answers: list[Answer]
    violations: int
    preemptions: int
    swaps: int


def prompt(length: int) -> list[int]:
    """Token ids that mean nothing."""
    return torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Teacher:
    """Chooses tokens on the CPU, and has a card that is computed in another type say the same.

    Attributes:
        error: how far the card's logits are off at most, as a share of the largest of their row.
    """

    def __init__(self) -> None:
        self.error = 0.0
        self._seen: list[tuple[Tensor, list[int]]] = []

    def choose(self, logits: Tensor, draws: Several[Draw]) -> list[int]:
        """On the CPU."""
        chosen = tokens(logits, draws)
        self._seen.append((logits.clone(), chosen))
        return chosen

    def teach(self, logits: Tensor, draws: Several[Draw]) -> list[int]:
        """On the card, in the same order."""
        exact, chosen = self._seen.pop(0)
        assert logits.shape == exact.shape and len(draws) == len(chosen), "the card's steps are not the CPU's"
        off = (logits.cpu() - exact).abs().amax(-1) / exact.abs().amax(-1)
        self.error = max(self.error, float(off.max()))
        return chosen


def converse(loop: EngineLoop) -> Told:
    """The same requests for every engine."""
    answers = [Answer() for _ in range(4)]
    loop.submit(GenerateRequest("first", tuple(prompt(14)), GREEDY), answers[0].take)
    loop.submit(GenerateRequest("second", tuple(prompt(6)), DRAWN), answers[1].take)
    loop.run_until_idle()
    preemptions, swaps = loop.stats().preemptions, loop.stats().swaps
    turn = (*prompt(14), *answers[0].token_ids, prompt(1)[0])
    loop.submit(GenerateRequest("turn", turn, GREEDY), answers[2].take)
    loop.submit(GenerateRequest("penalised", tuple(prompt(3)), PENALISED), answers[3].take)
    loop.run_until_idle()
    return Told(answers, loop.stats().block_violations, preemptions, swaps)


def main(model: Path, pretended: bool, kind: type[CardRunner], dtype: torch.dtype) -> None:
    """The CPU's and the card's, as it is, damaged, or in 16 bits."""
    config = read_config(read_config_json(model))
    settings = EngineSettings(
        model,
        threads=2,
        kv_pool_bytes=(PROMPT_BLOCKS + ANSWER_BLOCKS + 1) * BLOCK_TOKENS * bytes_per_token(config),
        prefill_fraction=PROMPT_BLOCKS / (PROMPT_BLOCKS + ANSWER_BLOCKS),
        prefill_chunk_tokens=12,
        block_tokens=BLOCK_TOKENS,
        swap_bytes=1024**2,
    )
    parts = load_parts(settings)
    teacher = Teacher()
    told = {"host": converse(EngineLoop(parts.runner, parts.scheduler, parts.limits, 2, choose_tokens=teacher.choose))}
    geometry = parts.scheduler.pool.geometry
    with PretendCard() if pretended else contextlib.nullcontext(), whole_products() if pretended else contextlib.nullcontext():
        card = OnCard(CARD) if pretended else open_card()
        runner, pool = build_on_card(card, config, ModelWeights(model), geometry, settings.swap_bytes, dtype)
        runner.__class__ = kind
        scheduler = Scheduler(pool, settings.max_running, settings.prefill_chunk_tokens, settings.prefix_cache, runner)
        choose = card.tokens if dtype is torch.float32 else teacher.teach
        told["card"] = converse(EngineLoop(runner, scheduler, parts.limits, 2, choose_tokens=choose))
        block_bytes = runner._cache.block_bytes
    print(json.dumps({name: asdict(one) for name, one in told.items()} | {"error": teacher.error, "block_bytes": block_bytes}))


if __name__ == "__main__":
    how = "".join(sys.argv[3:])
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    main(Path(sys.argv[1]), sys.argv[2] == "interpreter", DamagedRunner if how == "damaged" else CardRunner, kinds.get(how, torch.float32))
