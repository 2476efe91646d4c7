"""Whole passes of the compiled decoder over random small models, on arrays of exactly the size that it may touch.

`python -m tests.engine.int8_passes LIBRARY SEED MODELS` runs them in a process of their own, where the library may be one with
sanitizers in it: these see every step off an array, and off each part of the workspace (decoder.c).
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from appliance.engine.models.int8_decoder import Paging, Span
from appliance_kernels.kv_write.reference import WritePlan
from appliance_kernels.refcount.reference import OPEN
from appliance_kernels.x86 import reference
from appliance_kernels.x86.library import GROUP, PANEL, Layer, Matrix, Model, Step, address, opened

DIMS = (16, 48, 64, 80, 128, 256)
GROUPS = (1, 3, 8)
BLOCK_TOKENS = (1, 5, 8, 16, 24, 32)
THREADS = (1, 2, 5)
MODELS = len(DIMS) * len(GROUPS)
EPS = 0.01
ERROR, MOST_ERROR = 2e-6, 0.3
"""Of rows, from the definition: of most, and where a rounding elsewhere has moved an activation over the middle between two of 255."""
BASES = (100.0, 10_000.0)
"""Of rope; the layers have them in turn."""
_REDZONE = 64
_PATTERN = 0xA5


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model and its cache. `optional`: sandwich norms, norms of heads, and biases."""

    dim: int
    kv_heads: int
    group: int
    hidden: int
    intermediate: int
    windows: tuple[int, ...]
    block_tokens: int
    gelu: bool
    optional: bool

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * self.group


def some_shape(seed: int, choose: random.Random) -> Shape:
    """Among those that int8_decoder.why_not lets through; MODELS seeds after one another have every dim with every group."""
    dim, kv_heads, group = DIMS[seed % len(DIMS)], choose.choice((1, 2)), GROUPS[seed // len(DIMS) % len(GROUPS)]
    if dim * kv_heads * group % GROUP:
        kv_heads = 2
    return Shape(
        dim=dim,
        kv_heads=kv_heads,
        group=group,
        hidden=GROUP * choose.randint(1, 5),
        intermediate=GROUP * choose.randint(1, 7),
        windows=(choose.choice((0, choose.randint(1, 70))), choose.randint(1, 40)),
        block_tokens=BLOCK_TOKENS[(seed + seed // len(DIMS)) % len(BLOCK_TOKENS)],
        gelu=choose.random() < 0.5,
        optional=choose.random() < 0.5,
    )


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix, as it is and packed."""

    weight: Tensor
    bias: Tensor | None
    packed: Tensor
    scales: Tensor
    matrix: Matrix


class Net:
    """A model of random numbers, packed by one library, which computes its passes."""

    def __init__(self, library: ctypes.CDLL, shape: Shape, seed: int) -> None:
        self.library, self.shape = library, shape
        self._draw = torch.Generator().manual_seed(seed)
        q_rows, kv_rows = shape.heads * shape.dim, shape.kv_heads * shape.dim
        sizes = (
            (q_rows + 2 * kv_rows, shape.hidden),
            (shape.hidden, q_rows),
            (2 * shape.intermediate, shape.hidden),
            (shape.hidden, shape.intermediate),
        )
        wide, optional = shape.hidden, shape.optional
        self.norms = [
            (
                self._norm(wide),
                self._norm(q_rows + kv_rows) if optional else None,
                self._norm(wide) if optional else None,
                self._norm(wide),
                self._norm(wide) if optional else None,
            )
            for _ in shape.windows
        ]
        self.products = [[self._product(*size) for size in sizes] for _ in shape.windows]
        layers = [
            Layer(*map(address, norms), *(product.matrix for product in products), window, index % 2)
            for index, (norms, products, window) in enumerate(zip(self.norms, self.products, shape.windows, strict=True))
        ]
        self._layers = (Layer * len(layers))(*layers)
        numbers = (len(layers), shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.dim, int(shape.gelu))
        self._model = Model(self._layers, *numbers, EPS, shape.dim**-0.5)
        self.head, self._head_norm = self._product(PANEL * 3 - 5, shape.hidden), self._norm(shape.hidden)

    def normal(self, *size: int) -> Tensor:
        """Random."""
        return torch.randn(*size, generator=self._draw)

    def _norm(self, size: int) -> Tensor:
        return 1 + 0.2 * self.normal(size)

    def _product(self, height: int, columns: int) -> Product:
        rows = -(-height // PANEL) * PANEL
        weight = self.normal(height, columns)
        packed, scales = torch.empty(rows * columns, dtype=torch.uint8), torch.empty(rows * columns // GROUP, dtype=torch.int16)
        self.library.pack(address(weight), height, columns, address(packed), address(scales))
        bias = self.normal(rows) if self.shape.optional else None
        return Product(weight, bias, packed, scales, Matrix(address(packed), address(scales), address(bias), rows, columns))

    def logits(self, hidden: Tensor, normed: bool = False) -> Tensor:
        """The last product."""
        hidden, room = hidden.contiguous(), torch.empty(self.library.apply_bytes(*hidden.shape), dtype=torch.uint8)
        result = torch.full((hidden.shape[0], self.head.matrix.rows), float("nan"))
        where = (address(result), address(room))
        self.library.apply(
            address(hidden), hidden.shape[0], self.head.matrix, address(self._head_norm) if normed else None, ctypes.c_float(EPS), *where
        )
        return result

    def forward(self, x: Tensor, spans: Sequence[Span], cache: Cache) -> Tensor:
        """x: [rows, hidden], of these spans one after the other. → the last layer's result."""
        shape, tokens = self.shape, self.shape.block_tokens
        at = [(span.table[position // tokens], position % tokens, position) for span in spans for position in _positions(span)]
        blocks, offsets, positions = torch.tensor(at).T.contiguous()
        paging = Paging.of(spans, [WritePlan(None, blocks, offsets)], tokens, cache.null_block)
        turns = [_turns(paging.most_keys, shape.dim, base) for base in BASES]
        turn_addresses = (ctypes.c_void_p * len(turns))(*(address(turn) for turn in turns))
        rows = x.shape[0]
        size = self.library.workspace_bytes(self._model, rows, paging.most_keys)
        room = torch.full((size + _REDZONE,), _PATTERN, dtype=torch.uint8)
        refused, x = torch.zeros(1, dtype=torch.int32), x.clone()
        step = Step(
            *(address(one) for one in (x, positions, paging.rows, paging.blocks, paging.offsets, paging.segments, paging.tables)),
            turn_addresses,
            address(cache.memory),
            cache.memory[0, 0].numel(),
            *(address(one) for one in (room, cache.words, refused)),
            *(rows, paging.rows.shape[0], len(spans), tokens, paging.most_keys, cache.null_block),
        )
        self.library.forward(self._model, step)
        assert not refused
        assert room[size:].eq(_PATTERN).all(), "written behind the workspace"
        return x


class Cache:
    """[layer, keys and values, blocks and the null block, ...], zeros."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.null_block = blocks
        self.memory = torch.zeros(len(shape.windows), 2, blocks + 1, shape.kv_heads, shape.block_tokens * shape.dim)
        self.words = torch.full((blocks,), OPEN, dtype=torch.int32)


def _positions(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _turns(positions: int, dim: int, base: float) -> Tensor:
    angles = torch.arange(positions).unsqueeze(1) * base ** -(torch.arange(dim // 2) / (dim // 2))
    return torch.cat((angles.cos(), angles.sin()), 1).contiguous()


def definition(net: Net, x: Tensor) -> Tensor:
    """Of one sequence, what `forward` says in the end; in float64, with the products' own rounding."""
    shape, x = net.shape, x.double()
    count = len(x)
    at = torch.arange(count)
    for index, (window, norms, products) in enumerate(zip(shape.windows, net.norms, net.products, strict=True)):
        before, of_heads, after_attention, before_mlp, after_mlp = norms
        qkv, out, gate_up, down = products
        heads = _times(qkv, _normed(x, before)).view(count, -1, shape.dim)
        turned, v = heads[:, : shape.heads + shape.kv_heads], heads[:, shape.heads + shape.kv_heads :]
        if of_heads is not None:
            turned = _normed(turned, of_heads.view(-1, shape.dim))
        cos, sin = _turns(count, shape.dim, BASES[index % 2]).double().unsqueeze(1).chunk(2, -1)
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q, k = turned[:, : shape.heads], turned[:, shape.heads :].repeat_interleave(shape.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.dim**-0.5
        back = at.unsqueeze(1) - at
        scores = scores.masked_fill((back < 0) | (back >= (window or count)), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(shape.group, 1)).flatten(1)
        change = _times(out, mixed)
        x = x + (change if after_attention is None else _normed(change, after_attention))
        gate, up = _times(gate_up, _normed(x, before_mlp)).chunk(2, -1)
        gated = functional.gelu(gate, approximate="tanh") if shape.gelu else functional.silu(gate)
        change = _times(down, gated * up)
        x = x + (change if after_mlp is None else _normed(change, after_mlp))
    return x


def _times(product: Product, x: Tensor) -> Tensor:
    return reference.linear(x.float(), product.weight, product.bias).double()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


Cut = Sequence[tuple[int, int]]
"""One step: (which sequence, how many of its next tokens)."""


def run(net: Net, tokens: Sequence[Tensor], steps: Sequence[Cut], threads: int | None, shuffle: random.Random) -> list[Tensor]:
    """Each of `tokens`, [length, hidden], is one sequence. → what the last layer says of it, and what the cache holds of it."""
    block_tokens = net.shape.block_tokens
    needed = [-(-len(one) // block_tokens) for one in tokens]
    cache = Cache(net.shape, sum(needed))
    blocks = list(range(sum(needed)))
    shuffle.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    results: list[list[Tensor]] = [[] for _ in tokens]
    done = [0] * len(tokens)
    for step in steps:
        net.library.set_threads(threads or shuffle.choice(THREADS))
        spans: list[Span] = []
        for which, count in step:
            begin = sum(span.count for span in spans)
            spans.append(Span(begin, count, done[which], tables[which][: -(-(done[which] + count) // block_tokens)]))
        x = torch.cat([tokens[which][done[which] : done[which] + count] for which, count in step])
        result = net.forward(x, spans, cache)
        for (which, count), span in zip(step, spans, strict=True):
            results[which].append(result[span.begin : span.begin + count])
            done[which] += count
    assert not cache.memory[:, :, cache.null_block].any(), "the null block was written"
    kept = [cache.memory[:, :, table].transpose(1, 2).flatten(2) for table in tables]
    return [torch.cat(result) for result in results] + kept


def random_steps(choose: random.Random, lengths: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """A mixture of decode and prefill, at most so many tokens of a sequence at a time."""
    left, steps = list(lengths), []
    while any(left):
        some = [which for which in range(len(left)) if left[which]]
        some = choose.sample(some, choose.randint(1, len(some)))
        steps.append([(which, min(left[which], choose.choice((1, 1, choose.randint(1, most))))) for which in some])
        for which, count in steps[-1]:
            left[which] -= count
    return steps


def judge(libraries: Sequence[ctypes.CDLL], seed: int) -> Shape:
    """One random model: every bit of a sequence stays, alone or among others, however it is cut and by how many threads; a neighbour
    without usable numbers changes nothing. Of several libraries, the products have the same bits."""
    choose = random.Random(seed)
    shape = some_shape(seed, choose)
    nets = [Net(library, shape, seed) for library in libraries]
    lengths = [choose.choice((1, 2, choose.randint(3, 40), choose.randint(41, 150))) for _ in range(choose.randint(2, 5))]
    tokens = [nets[0].normal(length, shape.hidden) for length in lengths]
    rows = nets[0].normal(40, shape.hidden)
    for net in nets:
        _judge_sequences(net, tokens, choose)
        for one, other in zip((nets[0].head, *chain(*nets[0].products)), (net.head, *chain(*net.products)), strict=True):
            assert torch.equal(one.packed, other.packed), "packed otherwise"
            assert torch.equal(one.scales, other.scales), "packed otherwise"
        alone = torch.cat([nets[0].logits(row.unsqueeze(0)) for row in rows])
        for count in range(1, len(rows) + 1):
            assert torch.equal(net.logits(rows[-count:]), alone[-count:]), f"{count} rows"
            normed = net.logits(rows[-count:], normed=True)
            assert torch.equal(normed[:1], net.logits(rows[-count:][:1], normed=True)), f"{count} rows, normed"
    return shape


def _judge_sequences(net: Net, tokens: Sequence[Tensor], choose: random.Random) -> None:
    lengths = [len(one) for one in tokens]
    first = run(net, tokens, [[(which, length)] for which, length in enumerate(lengths)], 1, choose)
    assert all(bool(one.isfinite().all()) for one in first)
    defined = [definition(net, one) for one in tokens]
    errors = torch.cat([(one - other).norm(dim=1) / other.norm(dim=1) for one, other in zip(first, defined, strict=False)])
    assert errors.quantile(0.1) < ERROR, f"{net.shape}, {lengths}: {errors} from the definition"
    assert errors.max() < MOST_ERROR, f"{net.shape}, {lengths}: {errors} from the definition"
    for most in (3, 40, 150):
        result = run(net, tokens, random_steps(choose, lengths, most), None, choose)
        for index, (one, other) in enumerate(zip(first, result, strict=True)):
            assert torch.equal(one, other), f"{net.shape}, {lengths}: sequence {index % len(lengths)} at most {most} tokens at a time"
    own = net.shape
    for block_tokens in BLOCK_TOKENS:
        net.shape = replace(own, block_tokens=block_tokens)
        result = run(net, tokens, random_steps(choose, lengths, 40), None, choose)
        assert all(map(torch.equal, first[: len(tokens)], result)), f"{own}: otherwise in blocks of {block_tokens}"
    net.shape = own
    broken = net.normal(20, net.shape.hidden)
    broken[3:7, 5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    result = run(net, [*tokens, broken], random_steps(choose, [*lengths, 20], 20), None, choose)
    assert not result[len(lengths)][3:6].isfinite().any(), "what is no number got lost"
    assert all(torch.equal(first[index], result[index]) for index in range(len(lengths))), f"{net.shape}: beside a broken one"


def long_context(library: ctypes.CDLL, seed: int) -> None:
    """One decoded token behind 1,500 others, with and without a window."""
    shape = Shape(64, 1, 3, 64, 32, (0, 33), 16, gelu=False, optional=False)
    net, choose = Net(library, shape, seed), random.Random(seed)
    tokens = [net.normal(1501, 64)]
    whole = run(net, tokens, [[(0, 1501)]], 2, choose)
    assert torch.equal(whole[0], run(net, tokens, [[(0, 1500)], [(0, 1)]], 1, choose)[0])


def main() -> None:
    """A seed a model."""
    library = opened(Path(sys.argv[1]))
    assert library is not None
    seed, models = int(sys.argv[2]), int(sys.argv[3])
    shapes = {judge([library], seed + one) for one in range(models)}
    long_context(library, seed)
    library.set_threads(1)
    print(f"sound: {len(shapes)} models")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
