"""How honest the confidence of verdicts is, on cases as they are and with something missing.

    python tests/bench/confidence.py [--damage whole|unknown-wording|... ...] [--folder FOLDER ...] [--half 0|1] [--wrong high|medium]

For each kind of damage: how many verdicts were right, unknown and wrong, by confidence. A right verdict should be high or medium, a
wrong one low. `--half`: only the cases of one half, to look at while rules are written, the other to judge them by.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence
from tests.unit.diagnosis.corpus_cases import CORPUS, CorpusCase, load
from tests.unit.diagnosis.damages import DAMAGES, Judged, judge

FOLDERS = (CORPUS, CORPUS / "variants", CORPUS / "exam")
LEVELS = (Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW)


def half_of(case: CorpusCase) -> int:
    """0 or 1, the same for the same label: what is learnt from one kind is tried on others."""
    return zlib.crc32(case.cause.encode()) & 1


def show(damage: str, judged: list[Judged]) -> None:
    """One row."""
    right = Counter(item.confidence for item in judged if item.right)
    wrong = Counter(item.confidence for item in judged if item.wrong)
    unknown = sum(1 for item in judged if item.verdict.cause is Cause.UNKNOWN and not item.right)
    high = right[Confidence.HIGH] + wrong[Confidence.HIGH]
    precision = f"{right[Confidence.HIGH] / high:.1%}" if high else "-"
    print(
        f"{damage:16} {len(judged):5} {sum(right.values()):6} "
        + " ".join(f"{right[level]:5}" for level in LEVELS)
        + f" {unknown:8} {sum(wrong.values()):6} "
        + " ".join(f"{wrong[level]:5}" for level in LEVELS)
        + f"   {precision:>6} of high right, {high / max(1, len(judged)):4.0%} high"
    )


def main() -> None:
    """The table, and the wrong ones if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--damage", choices=list(DAMAGES), action="append")
    parser.add_argument("--folder", type=Path, action="append")
    parser.add_argument("--half", type=int, choices=(0, 1))
    parser.add_argument("--wrong", choices=[level.value for level in LEVELS], action="append", default=[])
    parser.add_argument("--right", choices=[level.value for level in LEVELS], action="append", default=[], help="list right verdicts too")
    options = parser.parse_args()
    cases = [case for folder in options.folder or FOLDERS for case in load(folder)]
    cases = [case for case in cases if options.half is None or half_of(case) == options.half]
    print(f"{'damage':16} cases  right  high   med   low  unknown  wrong  high   med   low")
    for damage in options.damage or DAMAGES:
        judged = list(judge(cases, damage))
        show(damage, judged)
        for item in judged:
            level = item.confidence.value
            if (item.wrong and level in options.wrong) or (item.right and level in options.right):
                root = item.verdict.root.text if item.verdict.root else ""
                mark = "right" if item.right else "WRONG"
                print(f"    {mark} {level} {item.case.name}: {item.case.cause} called {item.verdict.cause.label}: {root[:110]!r}")


if __name__ == "__main__":
    main()
