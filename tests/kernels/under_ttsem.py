"""Run under ttsem by test_ttsem.py, in a process of its own without the interpreter: prints one line of JSON, by case what came of it.

ttsem compiles each launch with Triton's own front end and executes that code, program after program, on exactly the memory that the
launch was given. An access outside of it is a fault, and so is an element that two programs of the launch touch, unless both only read
it or both only change it atomically. Memory that nobody has written is NaN.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance_kernels.gated_mlp import reference as gated_mlp
from appliance_kernels.gated_mlp import triton as gated_mlp_triton
from appliance_kernels.paged_decode import triton as paged_decode
from appliance_kernels.refcount import reference as words
from appliance_kernels.refcount import triton as refcount
from tests.bench import gpu_kernels
from tests.kernels import planted, test_attention_kernels, test_kv_write, test_row_kernels, test_sample_kernel

Case = Callable[[], None]


def _counts() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


def retain_by_load_and_store() -> None:
    """Two retain the same block."""
    counts, took = _counts()
    planted.retain_by_load_and_store[(2,)](counts, 1, took)


def tell_by_load_and_store() -> None:
    """Two tell of a violation."""
    planted.tell_by_load_and_store[(2,)](torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), 11)


def release_by_swap_after_a_load() -> None:
    """Two release the same block."""
    counts, freed = _counts()
    planted.release_by_swap_after_a_load[(2,)](counts, 1, freed)


def write_up_to_the_end() -> None:
    """Five of four."""
    planted.write_up_to_the_end[(5,)](torch.zeros(4), 4)


def retain_by_add_and_undo() -> None:
    """Wrong too, but in an order of several launches: see interleave.py."""
    counts, took = _counts()
    planted.retain_by_add_and_undo[(1,)](counts, 1, took)


def steps_on_words() -> None:
    """Each step on each kind of word, some twice, and on numbers that are no block: as the reference does them one after the other."""
    kinds = [0, words.OPEN, words.SEALED | 1, words.SEALED | 2, words.SEALED | words.KEPT, words.SEALED | words.KEPT | 1]
    blocks = [0, 1, 2, 3, 4, 5, 3, 1, 5, -1, len(kinds), 2**40, 3]
    for step in words.Step:
        found, expected = torch.tensor(kinds, dtype=torch.int32), torch.tensor(kinds, dtype=torch.int32)
        results = torch.empty(len(blocks), dtype=torch.int32)
        refcount.take_step(found, torch.tensor(blocks), step, results)
        assert results.tolist() == words.take_step(expected, blocks, step), step
        assert found.tolist() == expected.tolist(), step


def writes() -> None:
    """Into open blocks of one's own, and every way to stray."""
    for shape in test_kv_write.SHAPES:
        test_kv_write.test_only_open_blocks_of_the_writer_in_its_region_are_written("triton", *shape.values)
    test_kv_write.test_more_violations_than_fit_are_counted_and_write_past_nothing("triton")


def rows() -> None:
    """Odd lengths, heads inside wider rows, equal and infinite logits."""
    for kind in test_row_kernels.TYPES:
        test_row_kernels.test_rms_norm_is_its_formula((5, 123), *kind.values)
        test_row_kernels.test_rope_is_its_formula(3, 80, *kind.values)
        test_row_kernels.test_gates_are_their_formulas(gated_mlp_triton.silu_mul, gated_mlp.silu_mul, 41, *kind.values)
        test_row_kernels.test_gates_are_their_formulas(gated_mlp_triton.gelu_tanh_mul, gated_mlp.gelu_tanh_mul, 1500, *kind.values)
    test_row_kernels.test_rms_norm_of_heads_inside_wider_rows()
    test_sample_kernel.test_equal_ones_stand_in_the_order_of_their_ids()


def attention() -> None:
    """Several splits, windows, tables with entries that are none of the reader's, and one that is too short."""
    paged_decode.SPLIT = 64
    for shape in test_attention_kernels.SHAPES:
        test_attention_kernels.test_decode_is_attention(*shape.values)
        test_attention_kernels.test_prefill_is_attention(*shape.values)
    for way, stray in itertools.product(("decode", "prefill"), test_attention_kernels.STRAYS):
        test_attention_kernels.test_an_entry_outside_its_segment_is_told_and_never_read(way, *stray.values)
    test_attention_kernels.test_a_table_that_is_too_short_is_a_stray_and_not_read_past()
    test_attention_kernels.test_what_its_reader_may_not_read_is_replaced_by_the_null_block()


def every_kernel() -> None:
    """What gpu_kernels.py rehearses: each against float64."""
    bench = gpu_kernels.Bench(rehearse=True)
    for make in (gpu_kernels.row_cases, gpu_kernels.write_cases, gpu_kernels.decode_cases, gpu_kernels.prefill_cases):
        for case in make(bench):
            off = gpu_kernels.judge(case)
            assert off <= gpu_kernels.MOST_ERROR, f"{case.name}: off by {off:.1e}"


PLANTED: tuple[Case, ...] = (
    retain_by_load_and_store,
    tell_by_load_and_store,
    release_by_swap_after_a_load,
    write_up_to_the_end,
    retain_by_add_and_undo,
)
OURS: tuple[Case, ...] = (steps_on_words, writes, rows, attention, every_kernel)


def judged(case: Case) -> dict[str, Any]:
    """`verdict`: ok, wrong, or a fault's kind; what was `said` of it; the `kernels` that were launched; how many launches, too large for
    it, went `unchecked`."""
    from ttsem.sanitize import KernelFault, Unjudged, session

    kernels: set[str] = set()
    verdict, said = "ok", ""
    with session() as state:
        run = JITFunction.run

        def recorded(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
            kernels.add(kernel.__name__)
            return run(kernel, *arguments, **options)

        with mock.patch.object(JITFunction, "run", recorded):
            try:
                case()
            except KernelFault as fault:
                verdict, said = fault.fault.kind, str(fault)
            except Unjudged as unjudged:
                verdict, said = unjudged.verdict, f"{unjudged} {unjudged.unsupported}"
            except AssertionError:
                verdict, said = "wrong", traceback.format_exc()
    return {"verdict": verdict, "said": said, "kernels": sorted(kernels), "unchecked": state.races_unchecked}


if __name__ == "__main__":
    print(json.dumps({case.__name__: judged(case) for case in (*PLANTED, *OURS)}))
