"""What docs/adr/0002-batch-invariance.md claims of the libraries, on the machine that runs this."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers

from appliance.engine.models.linear import ROW_MULTIPLE, linear, padded_rows
from appliance_kernels.tiles import QUERY_ROWS, attend_tiles, padded_queries, window_mask
from tests.engine.test_tiny_models import SIZES, save_checkpoint

GENERATOR = torch.Generator().manual_seed(3)
ROOT = Path(__file__).parents[2]


def normal(*shape: int) -> torch.Tensor:
    """Random."""
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("columns", "inner"),
    [(960, 576), (576, 1536), (4096, 640), (640, 2048), (50257, 64), (96, 40), (100, 48), (48, 33), (2560, 3072)],
)
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(threads: int, columns: int, inner: int) -> None:
    """Whatever their number, a multiple of ROW_MULTIPLE, and wherever the row stands among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, x = normal(columns, inner), normal(272, inner)
        whole = linear(x, weight)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 17, 24, 31, 33, 48, 64, 66, 100, 127, 128, 130, 200, 256):
            begin = int(torch.randint(0, 272 - padded_rows(rows), (1,), generator=GENERATOR))
            part = linear(x[begin : begin + padded_rows(rows)].clone(), weight)
            assert torch.equal(part, whole[begin : begin + padded_rows(rows)]), f"{rows} rows from {begin}"
    finally:
        torch.set_num_threads(before)


def test_one_row_alone_is_why_rows_are_padded() -> None:
    """The rule is needed: without padding, the same row gets other last bits. If this fails, padding can go."""
    weight, x = normal(576, 1536), normal(ROW_MULTIPLE * 2, 1536)
    assert not torch.equal(linear(x[:1].clone(), weight), linear(x, weight)[:1])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("tile", [128, 144])
def test_attention_of_a_row_does_not_depend_on_batch_or_padding(threads: int, dim: int, tile: int) -> None:
    """More matrices, more query rows, more masked tiles behind and before: every bit of a row stays."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        length, window = 6 * tile, 3 * tile
        q, k, v = normal(5, 192, dim), normal(5, length, dim), normal(5, length, dim)
        at = torch.arange(3 * tile, 3 * tile + 192).clamp(max=5 * tile - 1)  # positions of the queries
        mask = window_mask(at.unsqueeze(1), torch.arange(length), window).unsqueeze(0)
        whole = attend_tiles(q, k, v, mask, dim**-0.5, tile)
        for matrices, begin, rows, first, end in (
            (1, 0, 8, 0, 4), (1, 0, 8, 0, 6), (2, 8, 16, 0, 5), (5, 64, 64, 0, 5), (3, 24, 40, 0, 6), (1, 184, 8, 1, 5), (4, 184, 8, 1, 6),
        ):  # fmt: skip
            keys = slice(first * tile, end * tile)
            part = attend_tiles(
                q[:matrices, begin : begin + rows].contiguous(),
                k[:matrices, keys].contiguous(),
                v[:matrices, keys].contiguous(),
                mask[:, begin : begin + rows, keys].contiguous(),
                dim**-0.5,
                tile,
            )
            assert torch.equal(part, whole[:matrices, begin : begin + rows]), f"{matrices} matrices, {rows} rows, tiles {first} to {end}"
    finally:
        torch.set_num_threads(before)


def test_query_rows_are_padded_to_the_multiple() -> None:
    """A group of 3 query heads takes 8 rows, one of 9 takes 16."""
    assert [padded_queries(rows) for rows in (1, 3, 8, 9, 192)] == [8, 8, 8, 16, 192]
    assert QUERY_ROWS == 8


INVARIANT = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.engine.driver import GREEDY, Driver, differences
from tests.engine.test_tiny_models import prompt
folder = Path(sys.argv[1])
prompts = {f"p{length}": prompt(length, length) for length in (1, 7, 31, 127, 129, 200)}
sampling = replace(GREEDY, max_new_tokens=24)
shape = {"kv_pool_bytes": 8 * 1024**2, "threads": 3}
alone = Driver(folder, **shape).alone(prompts, sampling)
assert not differences(alone, Driver(folder, **shape, max_running=6).run(prompts, sampling)), "in a batch"
assert not differences(alone, Driver(folder, **shape, prefill_chunk_tokens=19).run(prompts, sampling)), "in small chunks"
print("same")
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
        {"APPLIANCE_TEST_WITHOUT_ONEDNN": "1"},
    ],
    ids=["avx2", "sse4.1", "mkl"],
)
def test_the_engine_keeps_the_rule_on_other_processors(environment: dict[str, str], tmp_path: Path) -> None:
    """As far as this machine can play one: the libraries are told to use older instructions, or only MKL."""
    sizes = SIZES | {"hidden_size": 192, "intermediate_size": 640, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    folder = save_checkpoint(transformers.LlamaConfig(**sizes), tmp_path)
    prelude = ""
    if "APPLIANCE_TEST_WITHOUT_ONEDNN" in environment:
        prelude = "import appliance.engine.models.linear as one\none.HAS_ONEDNN, one.ROW_MULTIPLE = False, 8\n"
    ended = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(INVARIANT), str(folder)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout == "same\n", ended.stderr[-2000:]
