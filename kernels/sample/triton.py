"""The token of each row, by reference.py's rule, in one launch and without the host: w_i = e^((l_i − max l) / T), 0 below min_p;

    top_k   v = the k-th largest w;     S ← Σ of the k largest
    top_p   P = top_p · S;              S ← Σ of the fewest largest that reach P
    pick    the first token, from the largest w down, at which the running sum exceeds u · S

Equal ones stand in the order of their ids. Nothing is sorted: A(x) = Σ w_i over w_i > x falls as x rises, so the value at which it
passes a bound is found by halving an interval of x until it holds one value: x is a float, and its bits are a whole number that
rises with it. Among equal ones the rest of the sum says which. Without top_k and top_p the order is that of the ids.

Sums are float32 (reference.py's are float64): where u lies within some 10⁻⁶ of a token's edge, its neighbour may be taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from appliance_kernels.sample.reference import NOT_FINITE, Draw

_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NEVER = tl.constexpr(float("-inf"))
_ONE_BITS = tl.constexpr(0x3F800000)
"""1.0, the largest w."""
_JUST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-23)
WIDTH = 2048
WARPS = 16


@triton.jit
def beyond(shares_ptr, bits, vocab, WIDTH: tl.constexpr):
    """The sum and the number of the shares that are larger than the float of these bits. shares_ptr: [vocab], float32."""
    mass = tl.zeros((WIDTH,), tl.float32)
    count = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, vocab, WIDTH):
        column = start + tl.arange(0, WIDTH)
        share = tl.load(shares_ptr + column, mask=column < vocab, other=0.0)
        larger = share.to(tl.int32, bitcast=True) > bits
        mass += tl.where(larger, share, 0.0)
        count += larger.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def at_most(shares_ptr, bits, vocab, WIDTH: tl.constexpr):
    """The bits of the largest share that is not larger than the float of these bits."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, vocab, WIDTH):
        column = start + tl.arange(0, WIDTH)
        share = tl.load(shares_ptr + column, mask=column < vocab, other=0.0).to(tl.int32, bitcast=True)
        found = tl.maximum(found, tl.max(tl.where(share <= bits, share, 0), 0))
    return found


@triton.jit
def edge(shares_ptr, most_mass, most_count, positive, vocab, WIDTH: tl.constexpr):
    """The smallest share x with A(x) ≤ most_mass and no more than most_count larger ones: its bits, A(x), and how many are larger.

    positive: how many shares are larger than 0. The interval (low, high] always has x in it; it is halved until nothing else is.
    """
    low = tl.full((), 0, tl.int32)
    high = tl.full((), _ONE_BITS, tl.int32)
    low_count = positive
    mass = tl.full((), 0.0, tl.float32)
    count = tl.full((), 0, tl.int32)
    while (high - low > 1) & (low_count - count > 1):
        middle = low + (high - low) // 2
        middle_mass, middle_count = beyond(shares_ptr, middle, vocab, WIDTH)
        if (middle_mass <= most_mass) & (middle_count <= most_count):
            high, mass, count = middle, middle_mass, middle_count
        else:
            low, low_count = middle, middle_count
    return at_most(shares_ptr, high, vocab, WIDTH), mass, count


@triton.jit
def equal_share(shares_ptr, bits, rank, vocab, WIDTH: tl.constexpr):
    """The id of the share of these bits that has `rank` equal ones before it, or of the last equal one."""
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    for start in range(0, vocab, WIDTH):
        column = start + tl.arange(0, WIDTH)
        share = tl.load(shares_ptr + column, mask=column < vocab, other=-1.0)
        equal = (share.to(tl.int32, bitcast=True) == bits).to(tl.int32)
        place = seen + tl.cumsum(equal, 0) - 1
        fits = (equal == 1) & (place <= rank)
        found = tl.maximum(found, tl.max(tl.where(fits, column, -1), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def first_past(shares_ptr, bound, vocab, WIDTH: tl.constexpr):
    """The first id at which the running sum, in the order of the ids, exceeds the bound, or the last id that has a share."""
    before = tl.full((), 0.0, tl.float32)
    found = tl.full((), 0, tl.int32) + vocab
    last = tl.full((), 0, tl.int32)
    for start in range(0, vocab, WIDTH):
        column = start + tl.arange(0, WIDTH)
        share = tl.load(shares_ptr + column, mask=column < vocab, other=0.0)
        past = (before + tl.cumsum(share, 0) > bound) & (share > 0.0)
        found = tl.minimum(found, tl.min(tl.where(past, column, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(share > 0.0, column, 0), 0))
        before += tl.sum(share, 0)
    return tl.where(found < vocab, found, last)


@triton.jit
def largest(logits_ptr, vocab, WIDTH: tl.constexpr):
    """The largest number of a row and the first id that has it; NaN counts as the largest. logits_ptr: [vocab]."""
    top = tl.full((), _NEVER, tl.float32)
    token = tl.full((), 0, tl.int32)
    nans = tl.full((), 0, tl.int32)
    for start in range(0, vocab, WIDTH):
        column = start + tl.arange(0, WIDTH)
        logit = tl.load(logits_ptr + column, mask=column < vocab, other=_NEVER).to(tl.float32)
        nans += tl.sum((logit != logit).to(tl.int32), 0)
        here = tl.max(tl.where(logit != logit, _NEVER, logit), 0)
        first = tl.min(tl.where(logit == here, column, vocab), 0)
        token = tl.where(here > top, first, token)
        top = tl.maximum(top, here)
    return tl.where(nans > 0, float("nan"), top), token


@triton.jit
def sample_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    us_ptr,
    shares_ptr,
    tokens_ptr,
    row_stride,
    vocab,
    WIDTH: tl.constexpr,
):
    """Row `program_id(0)`.

    logits_ptr: [rows, vocab], rows row_stride elements apart. temperatures_ptr, top_ps_ptr, min_ps_ptr, us_ptr: [rows], float32;
    top_ks_ptr: [rows], int32. shares_ptr: [rows, vocab], float32, contiguous: memory. tokens_ptr: [rows], int64.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    shares_ptr += row * vocab
    temperature = tl.load(temperatures_ptr + row)
    top, token = largest(logits_ptr, vocab, WIDTH)
    if (top != top) | (tl.abs(top) == float("inf")):
        token = tl.full((), _NOT_FINITE, tl.int32)
    elif temperature > 0.0:
        min_p = tl.load(min_ps_ptr + row)
        for start in range(0, vocab, WIDTH):
            column = start + tl.arange(0, WIDTH)
            logit = tl.load(logits_ptr + column, mask=column < vocab, other=_NEVER).to(tl.float32)
            share = tl.exp((logit - top) / temperature)
            tl.store(shares_ptr + column, tl.where(share >= min_p, share, 0.0), mask=column < vocab)
        tl.debug_barrier()  # other threads of this program wrote what is read now
        token = drawn(shares_ptr, tl.load(top_ks_ptr + row), tl.load(top_ps_ptr + row), tl.load(us_ptr + row), vocab, WIDTH)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def drawn(shares_ptr, top_k, top_p, u, vocab, WIDTH: tl.constexpr):
    """The token of a row of shares, the largest of which is 1. shares_ptr: [vocab], float32."""
    whole, positive = beyond(shares_ptr, 0, vocab, WIDTH)
    kept = whole
    if (top_k > 0) & (top_k < vocab):
        bits, mass, count = edge(shares_ptr, whole, top_k - 1, positive, vocab, WIDTH)
        kept = tl.minimum(mass + (top_k - count).to(tl.float32) * bits.to(tl.float32, bitcast=True), whole)
    if top_p < 1.0:
        # The value at which the running sum reaches P: the smallest whose larger ones sum to less than P.
        bound = tl.maximum(top_p * kept, 1e-30)
        bits, mass, _ = edge(shares_ptr, bound * _JUST_BELOW_ONE, vocab, positive, vocab, WIDTH)
        value = bits.to(tl.float32, bitcast=True)
        kept = tl.minimum(mass + tl.maximum(tl.ceil((bound - mass) / value), 1.0) * value, kept)
    bound = tl.minimum(u * kept, kept * _JUST_BELOW_ONE)
    if (top_k > 0) | (top_p < 1.0):
        bits, mass, _ = edge(shares_ptr, bound, vocab, positive, vocab, WIDTH)
        rank = tl.floor((bound - mass) / bits.to(tl.float32, bitcast=True)).to(tl.int32)
        token = equal_share(shares_ptr, bits, rank, vocab, WIDTH)
    else:
        token = first_past(shares_ptr, bound, vocab, WIDTH)
    return token


def sample(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, us: Tensor) -> Tensor:
    """A token for each row. One launch; nothing is waited for.

    Args:
        logits: [rows, vocab], rows contiguous; −inf where a token may not be chosen.
        temperatures: [rows], float32; 0: the largest, the first of equal ones.
        top_ks: [rows], int32; 0: all.
        top_ps: [rows], float32, in (0, 1]; 1: all.
        min_ps, us: [rows], float32, in [0, 1).

    Returns:
        [rows], int64; NOT_FINITE where the largest is NaN or infinite.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        shares = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
        sample_kernel[(rows,)](
            *(logits, temperatures, top_ks, top_ps, min_ps, us, shares, tokens, logits.stride(0), vocab),
            WIDTH=min(WIDTH, triton.next_power_of_2(vocab)),
            num_warps=WARPS,
        )
    return tokens


def tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """As reference.tokens."""
    numbers = torch.tensor([(draw.temperature, draw.top_p, draw.min_p, draw.u) for draw in draws], dtype=torch.float32)
    temperatures, top_ps, min_ps, us = numbers.t().contiguous().to(logits.device)
    top_ks = torch.tensor([draw.top_k for draw in draws], dtype=torch.int32).to(logits.device)
    chosen: list[int] = sample(logits, temperatures, top_ks, top_ps, min_ps, us).tolist()
    return chosen
