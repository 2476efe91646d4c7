"""Block words on a real card: `python tests/bench/gpu_refcount.py [--seconds N]`. Needs CUDA and Triton; exit code 1 is a defect, 77 that
nothing was measured.

Four streams launch random steps on few words at the same time, so that swaps really collide. After each round the words must be
what the results say: holders = claims + retains − releases, and no result may stand for a word that the table cannot lead to.
Then what a launch takes on the card, beside a plain atomic add of the same shape.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench._card import leave_without_a_card

if __name__ == "__main__" and not {"-h", "--help"} & {*sys.argv}:
    leave_without_a_card()

import torch

from appliance_kernels.refcount import triton as kernel
from appliance_kernels.refcount.reference import HOLDERS, KEPT, SEALED, Step

BLOCKS = 64
LANES = 4096
BUSY_CYCLES = 100_000_000
"""Some 50 ms of a card's clock, in which the host launches all that is timed."""
GAIN = {Step.CLAIM: 1, Step.RETAIN: 1, Step.RELEASE: -1}


def one_round(words: torch.Tensor, streams: list[torch.cuda.Stream], generator: torch.Generator) -> str | None:
    """Concurrent launches on shared words; a sentence when the books do not balance."""
    before = (words & HOLDERS).cpu()
    launches = []
    for stream in streams:
        for _ in range(4):
            step = Step(int(torch.randint(len(Step), (1,), generator=generator)))
            blocks = torch.randint(-2, BLOCKS + 2, (LANES,), generator=generator).cuda()
            launches.append((stream, step, blocks, torch.empty(LANES, dtype=torch.int32, device="cuda")))
    torch.cuda.synchronize()
    for stream, step, blocks, results in launches:
        with torch.cuda.stream(stream):
            kernel.take_step(words, blocks, step, results)
    torch.cuda.synchronize()
    gained = torch.zeros(BLOCKS, dtype=torch.int64)
    for _, step, blocks, results in launches:
        took = results.cpu() >= 0
        counted = torch.bincount(blocks.cpu()[took], minlength=BLOCKS)
        gained += GAIN.get(step, 0) * counted
        if not ((blocks.cpu() < 0) | (blocks.cpu() >= BLOCKS)).eq(results.cpu() == -2).all():
            return f"{step.name}: a number that is no block was not refused as one"
    after = words.cpu()
    if not torch.equal(before + gained, (after & HOLDERS).to(torch.int64)):
        wrong = int((before + gained != (after & HOLDERS)).nonzero()[0])
        return f"block {wrong}: {int(before[wrong])} holders and {int(gained[wrong])} more, but the word is {int(after[wrong]):#x}"
    legal = (after == 0) | (after == 1) | ((after & SEALED != 0) & ((after & HOLDERS != 0) | (after & KEPT != 0)))
    return None if legal.all() else f"a word that the table cannot lead to: {int(after[~legal][0]):#x}"


def launch_us(launch: object, times: int = 200) -> float:
    """Microseconds a launch takes on the card, not the host: all of them wait there when the first begins."""
    assert callable(launch)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch()
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    for _ in range(times):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    words = torch.zeros(BLOCKS, dtype=torch.int32, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    rounds, until_s = 0, time.monotonic() + arguments.seconds
    while time.monotonic() < until_s:
        complaint = one_round(words, streams, generator)
        if complaint is not None:
            sys.exit(f"round {rounds}: {complaint}")
        rounds += 1
    print(f"{torch.cuda.get_device_name()}: {rounds} rounds of 16 launches of {LANES} steps on {BLOCKS} words, the books balance")
    blocks = torch.arange(LANES, device="cuda") % 8192
    wide = torch.full((8192,), SEALED | 1, dtype=torch.int32, device="cuda")
    results, ones = torch.empty(LANES, dtype=torch.int32, device="cuda"), torch.ones(LANES, dtype=torch.int32, device="cuda")
    print(f"  retain, compare-and-swap: {launch_us(lambda: kernel.take_step(wide, blocks, Step.RETAIN, results)):.1f} us a launch")
    print(f"  index_add_ of as many ones: {launch_us(lambda: wide.index_add_(0, blocks, ones)):.1f} us a launch")


if __name__ == "__main__":
    main()
