"""The kernels on a real card: `python tests/bench/gpu_kernels.py [--seconds N]`. Needs CUDA and Triton; exit code 1 is a wrong
result, 77 that nothing was measured.

Each kernel is first held against its reference in float64, then timed, cold (the card's cache is overwritten before each launch), and
compared with the time that its bytes take at the rate of a copy, or its products at the rate of a large matrix product, both measured
here; and with torch's own way to the same result, where it has one. Then the engine itself, in float32, beside the CPU's.
`--rehearse` goes through all of it without a card: small sizes, Triton's interpreter, no times, torch's way once.
"""

# ruff: noqa: E402 - a card is asked for before what only runs there is imported

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench._card import leave_without_a_card

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
elif __name__ == "__main__" and not {"-h", "--help"} & {*sys.argv}:
    leave_without_a_card()

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from appliance_kernels.gated_mlp import reference as gated_mlp
from appliance_kernels.kv_write.reference import Guard
from appliance_kernels.on_card import Cache, OnCard, Piece, Reader
from appliance_kernels.refcount.reference import OPEN
from appliance_kernels.rope.reference import rope, rope_turn
from appliance_kernels.sample.reference import Draw, sample
from appliance_kernels.tiles import CacheShape
from tests.bench._card_engine import engine, real_model

BLOCK_TOKENS = 16
REPEATS = 20
MOST_ERROR = 0.02
"""Of the largest number, in bfloat16."""
FROM_EDGES = 1e-5
"""Of a draw to the next token's: the kernel's sums are float32, and nearer than some 1e-6 the neighbour is as right."""
BUSY_CYCLES = 2_000_000
"""A millisecond of a card's clock, in which the host prepares what is timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size.

    Attributes:
        ours, theirs: launch it; torch's way, or None.
        wrote: where it returns nothing, what it wrote.
        exact: the result in float64.
        moved_bytes, products: what cannot be done without.
    """

    name: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], object] | None
    exact: Callable[[], Tensor]
    moved_bytes: int
    products: int = 0
    wrote: Callable[[], Tensor] | None = None


class Bench:
    """A card, or the interpreter in its place, and the sizes that suit it."""

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
        self.dtype = torch.float16 if rehearse else torch.bfloat16
        self.card = OnCard(self.device)
        self._cold = torch.empty(0 if rehearse else 64 * 1024**2, dtype=torch.int32, device=self.device)
        torch.manual_seed(1)

    def normal(self, *shape: int) -> Tensor:
        """Of the type that is served."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def size(self, real: int, rehearsed: int) -> int:
        """Of a case."""
        return rehearsed if self.rehearse else real

    def time_us(self, launch: Callable[[], object]) -> float:
        """The median of cold launches, on the card: it is kept busy in front of them, so that the host's part of a launch is over."""
        times = []
        for _ in range(REPEATS + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._cold.zero_()
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[3:])

    def bytes_per_us(self) -> float:
        """Read and written by a copy of half a gibibyte."""
        source = torch.empty(512 * 1024**2, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.time_us(lambda: target.copy_(source))

    def products_per_us(self) -> float:
        """Multiplications and additions of a matrix product."""
        side = 8192
        a, b = self.normal(side, side), self.normal(side, side)
        return 2 * side**3 / self.time_us(lambda: a @ b)


def row_cases(bench: Bench) -> Iterator[Case]:
    """rms_norm, rope, gated_mlp, sample."""
    rows, hidden = bench.size(4096, 3), bench.size(4096, 200)
    x, weight = bench.normal(rows, hidden), bench.normal(hidden)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    yield Case(
        f"rms_norm {rows}x{hidden}",
        lambda: bench.card.rms_norm(x, weight, 1e-6),
        lambda: functional.rms_norm(x, (hidden,), weight, 1e-6),
        lambda: x.double() * scale * weight.double(),
        2 * x.nbytes,
    )
    heads, dim = bench.size(40, 3), bench.size(128, 32)
    q = bench.normal(rows, heads, dim)
    cos, sin = rope_turn(10_000.0 ** (-torch.arange(0, dim, 2, device=bench.device) / dim), torch.arange(rows, device=bench.device))
    yield Case(
        f"rope {rows}x{heads}x{dim}",
        lambda: bench.card.rope(q, cos, sin),
        lambda: rope(q, cos.to(q.dtype), sin.to(q.dtype)),
        lambda: rope(q.double(), cos.double(), sin.double()),
        2 * q.nbytes + cos.nbytes + sin.nbytes,
    )
    inner = bench.size(14336, 70)
    gate_up = bench.normal(rows, 2 * inner)
    yield Case(
        f"gated_mlp {rows}x{inner}",
        lambda: bench.card.silu_mul(gate_up),
        lambda: functional.silu(gate_up[:, :inner]) * gate_up[:, inner:],
        lambda: gated_mlp.silu_mul(gate_up.double()),
        gate_up.nbytes * 3 // 2,
    )
    yield from sample_cases(bench)


def sample_cases(bench: Bench) -> Iterator[Case]:
    """8 rows; torch's way is a sort of each."""
    vocab = bench.size(128_256, 300)
    logits = (3 * torch.randn(8, vocab)).to(bench.device)
    rows = logits.cpu()
    for name, kind in (("top-p", Draw(0.8, top_p=0.95)), ("top-k", Draw(0.8, top_k=40)), ("plain", Draw(0.8))):
        draws = [steady(row, kind, (number + 0.4) / 8) for number, row in enumerate(rows)]
        yield Case(
            f"sample {name} 8x{vocab}",
            lambda draws=draws: torch.tensor(bench.card.tokens(logits, draws)),  # type: ignore[misc]
            lambda: torch.multinomial(torch.softmax(torch.sort(logits / 0.8, descending=True).values, -1), 1).tolist(),
            lambda draws=draws: torch.tensor(  # type: ignore[misc]
                [chosen(row, draw) for row, draw in zip(rows, draws, strict=True)]
            ),
            logits.nbytes,
        )


def chosen(row: Tensor, draw: Draw, aside: float = 0.0) -> int:
    """The token of a row, in float64."""
    return sample(row, draw.temperature, draw.top_k, draw.top_p, draw.u + aside, draw.min_p)


def steady(row: Tensor, kind: Draw, least_u: float) -> Draw:
    """With the first u from there on that is far from the edges of its token."""
    for step in range(1000):
        draw = replace(kind, u=least_u + step * 1e-4)
        if chosen(row, draw, -FROM_EDGES) == chosen(row, draw, FROM_EDGES):
            return draw
    raise AssertionError(f"no token of the row is wider than {2 * FROM_EDGES}")


class Paged:
    """Sequences of one length in a shuffled cache, and the same keys and values side by side."""

    def __init__(self, bench: Bench, sequences: int, length: int, kv_heads: int, group: int, dim: int) -> None:
        entries = -(-length // BLOCK_TOKENS)
        blocks = sequences * entries
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)).view(sequences, entries)
        self.k_cache, self.v_cache = (bench.normal(blocks + 2, kv_heads, BLOCK_TOKENS, dim) for _ in range(2))
        self.words = torch.full((blocks + 1,), OPEN, dtype=torch.int32, device=bench.device)
        self.owners = torch.zeros(blocks + 1, dtype=torch.int64, device=bench.device)
        for sequence, row in enumerate(order):
            self.owners[row.to(bench.device)] = sequence
        self.readers = [Reader(sequence, row.tolist(), entries) for sequence, row in enumerate(order)]
        self.violations = bench.card.violations()
        guard = Guard(self.words, self.owners, 0, blocks + 1)
        self.cache = Cache(CacheShape(BLOCK_TOKENS, kv_heads, group, blocks), dim, bench.dtype, guard, self.violations)
        where = order.to(bench.device)
        # [sequences, kv_heads, length, dim]
        self.k, self.v = (
            side[where].transpose(1, 2).reshape(sequences, kv_heads, -1, dim)[:, :, :length].contiguous()
            for side in (self.k_cache, self.v_cache)
        )
        self.scale = dim**-0.5

    def exact(self, q: Tensor, first_position: int) -> Tensor:
        """[sequences, heads, tokens, dim] queries at the last positions, in float64, sequence by sequence."""
        found = []
        for query, k, v in zip(q, self.k, self.v, strict=True):
            group = q.shape[1] // k.shape[0]
            keys, values = (side.double().repeat_interleave(group, 0) for side in (k, v))
            scores = query.double() @ keys.transpose(1, 2) * self.scale
            at = torch.arange(first_position, first_position + q.shape[2], device=q.device).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(keys.shape[1], device=q.device) > at, float("-inf"))
            found.append(torch.softmax(scores, -1) @ values)
        return torch.stack(found)


def decode_cases(bench: Bench) -> Iterator[Case]:
    """One sequence and eight, short and long: heads as of Llama 3 8B."""
    sizes = [(1, 512), (1, 8192), (8, 2048), (32, 2048)] if not bench.rehearse else [(2, 40)]
    kv_heads, group, dim = (8, 4, 128) if not bench.rehearse else (2, 2, 32)
    for sequences, length in sizes:
        paged = Paged(bench, sequences, length, kv_heads, group, dim)
        q = bench.normal(sequences, kv_heads * group, dim)
        out = torch.empty(sequences, kv_heads * group * dim, dtype=bench.dtype, device=bench.device)

        def ours(paged: Paged = paged, q: Tensor = q, out: Tensor = out, last: int = length - 1) -> Tensor:
            plans = bench.card.plan_decode(paged.readers, [last] * len(q), [0], paged.cache)
            plans[0](q, paged.k_cache, paged.v_cache, paged.scale, out)
            return out

        step = bench.card.plan_decode(paged.readers, [length - 1] * sequences, [0], paged.cache)[0]

        def layer(step: Callable[..., None] = step, paged: Paged = paged, q: Tensor = q, out: Tensor = out) -> Tensor:
            step(q, paged.k_cache, paged.v_cache, paged.scale, out)
            return out

        def theirs(paged: Paged = paged, q: Tensor = q) -> Tensor:
            return functional.scaled_dot_product_attention(q.unsqueeze(2), paged.k, paged.v, enable_gqa=True)

        def exact(paged: Paged = paged, q: Tensor = q, last: int = length - 1) -> Tensor:
            return paged.exact(q.unsqueeze(2), last).flatten(1)

        yield Case(f"paged_decode {sequences}x{length}", layer, theirs, exact, paged.k.nbytes + paged.v.nbytes)
        yield Case(f"paged_decode {sequences}x{length} and its plan", ours, None, exact, paged.k.nbytes + paged.v.nbytes)


def prefill_cases(bench: Bench) -> Iterator[Case]:
    """A whole prompt, and a chunk behind a cached beginning."""
    sizes = [(2048, 2048), (512, 8192)] if not bench.rehearse else [(9, 30)]
    kv_heads, group, dim = (8, 4, 128) if not bench.rehearse else (2, 2, 32)
    for count, length in sizes:
        paged = Paged(bench, 1, length, kv_heads, group, dim)
        start = length - count
        q = bench.normal(count, kv_heads * group, dim)
        by_head = q.transpose(0, 1).unsqueeze(0).contiguous()
        out = torch.empty(count, kv_heads * group * dim, dtype=bench.dtype, device=bench.device)
        plan = bench.card.plan_prefill([Piece(paged.readers[0], 0, start, count)], [0], paged.cache)[0]

        def ours(plan: Callable[..., None] = plan, paged: Paged = paged, q: Tensor = q, out: Tensor = out) -> Tensor:
            plan(q, paged.k_cache, paged.v_cache, paged.scale, out)
            return out

        def theirs(paged: Paged = paged, q: Tensor = by_head, count: int = count, length: int = length) -> Tensor:
            # A mask of booleans would keep torch from its flash attention.
            return functional.scaled_dot_product_attention(
                q, paged.k, paged.v, attn_mask=causal_lower_right(count, length), enable_gqa=True
            )

        def exact(paged: Paged = paged, q: Tensor = by_head, start: int = start) -> Tensor:
            return paged.exact(q, start)[0].transpose(0, 1).flatten(1)

        pairs = count * start + count * (count + 1) // 2
        moved = 2 * q.nbytes + paged.k.nbytes + paged.v.nbytes
        yield Case(f"paged_prefill {count} behind {start}", ours, theirs, exact, moved, 4 * pairs * kv_heads * group * dim)


def write_cases(bench: Bench) -> Iterator[Case]:
    """A step's keys and values into their blocks."""
    tokens, kv_heads, dim = bench.size(4096, 20), bench.size(8, 2), bench.size(128, 16)
    paged = Paged(bench, 1, tokens, kv_heads, 1, dim)
    k, v = bench.normal(tokens, kv_heads, dim), bench.normal(tokens, kv_heads, dim)
    table = paged.readers[0].table
    slots = [table[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS for token in range(tokens)]
    write = bench.card.plan_write(slots, [0] * tokens, paged.cache.guard, paged.cache)
    where = torch.tensor(slots, device=bench.device)

    def ours() -> Tensor:
        write(k, v, paged.k_cache, paged.v_cache)
        return paged.v_cache

    def wrote() -> Tensor:
        return torch.stack([cache[where // BLOCK_TOKENS, :, where % BLOCK_TOKENS] for cache in (paged.k_cache, paged.v_cache)])

    def theirs() -> None:
        paged.k_cache[where // BLOCK_TOKENS, :, where % BLOCK_TOKENS] = k
        paged.v_cache[where // BLOCK_TOKENS, :, where % BLOCK_TOKENS] = v

    exact = torch.stack((k, v)).double()
    yield Case(f"kv_write {tokens}x{kv_heads}x{dim}", ours, theirs, lambda: exact, 2 * (k.nbytes + v.nbytes), wrote=wrote)


def judge(case: Case) -> float:
    """How far off it is, of the largest number; for token ids, the share of other ones."""
    returned = case.ours()
    found, exact = (case.wrote() if case.wrote else returned).double().cpu(), case.exact().double().cpu()
    if case.name.startswith("sample"):
        return float((found != exact).double().mean())
    return float((found - exact).abs().max() / exact.abs().max())


def kernels(bench: Bench, until_s: float) -> bool:
    """Every case; whether all are right."""
    rates = (0.0, 0.0) if bench.rehearse else (bench.bytes_per_us(), bench.products_per_us())
    if not bench.rehearse:
        print(f"copy {rates[0] / 1e3:.0f} GB/s, matrix product {rates[1] / 1e6:.0f} TFLOP/s")
    print(f"{'kernel':44} {'off by':>8} {'us':>9} {'floor us':>9} {'of floor':>9} {'torch us':>9}")
    good = True
    for make in (row_cases, write_cases, decode_cases, prefill_cases):
        for case in make(bench):
            off = judge(case)
            good &= off <= MOST_ERROR
            line = f"{case.name:44} {off:8.1e}"
            if bench.rehearse and case.theirs:
                case.theirs()
            if not bench.rehearse and time.monotonic() < until_s:
                ours_us = bench.time_us(case.ours)
                floor_us = max(case.moved_bytes / rates[0], case.products / rates[1])
                theirs_us = f"{bench.time_us(case.theirs):9.1f}" if case.theirs else ""
                line += f" {ours_us:9.1f} {floor_us:9.1f} {floor_us / ours_us:9.0%} {theirs_us}"
            print(line + ("" if off <= MOST_ERROR else "   WRONG"), flush=True)
    return good


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0, help="after which nothing more is timed (default: 200)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="also serve this model, on the CPU and on the card")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.seconds
    bench = Bench(arguments.rehearse)
    card = "a rehearsal in Triton's interpreter: not measured" if bench.rehearse else torch.cuda.get_device_name()
    print(f"{time.strftime('%Y-%m-%d')}, {card}, torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}")
    with torch.inference_mode():
        good = kernels(bench, until_s)
    good &= engine("interpreter" if bench.rehearse else "cuda")
    if arguments.model is not None:
        good &= real_model(arguments.model, "cpu" if bench.rehearse else "cuda")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
