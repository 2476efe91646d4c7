"""What the scan of long logs keeps, and what it need not look at."""

# ruff: noqa: E501 (lines are quoted as engines print them)

from __future__ import annotations

import random
import time

import pytest

from appliance.core.causes import Cause
from appliance.diagnosis import diagnose, load_catalogue, read_evidence
from appliance.diagnosis.catalogue import LOGS
from appliance.diagnosis.cues import WORDS, Cues
from appliance.diagnosis.scan import MANY, Sieve
from tests.unit.diagnosis.corpus_cases import CORPUS, load

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free."
TRAFFIC = 'INFO:     10.0.0.{n}:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
WORDS_OF_LANGUAGE = [bytes(random.Random(seed).choices(b"ghijlmnopqrtuvwxyz", k=7)).decode() for seed in range(3000)]


def prose(count: int, before: str = "") -> list[str]:
    """Lines that never repeat."""
    dice = random.Random(3)
    return [f"{before}{' '.join(dice.choices(WORDS_OF_LANGUAGE, k=25))}" for _ in range(count)]


@pytest.mark.parametrize("word", WORDS)
def test_each_word_is_found_wherever_it_stands(word: str) -> None:
    """Between letters where it may be a part of a word, else between what is none; in one line of many."""
    inner = word if word.strip() != word or not word.isalpha() else f"x{word}y"
    lines = [line.encode() for line in prose(50)]
    lines[17] = f"2026-08-16 {inner} 12".encode()
    assert 17 in Cues().rows(lines)


def test_many_words_that_tell_are_found_as_few_are() -> None:
    """Hundreds of them in one chunk."""
    lines = [f"{number} {word} x".encode() if number % 2 else b"hym" for number, word in enumerate(WORDS * 3)]
    assert Cues().rows(lines) >= {row for row in range(len(lines)) if row % 2}


@pytest.mark.parametrize("at_once", [12, 100_000])
def test_the_quick_way_finds_every_line_that_the_slow_one_does(at_once: int) -> None:
    """Of all lines of all worked cases: whatever a pattern notes has a word and a literal, a few lines at a time or all together."""
    cases = [*load(CORPUS), *load(CORPUS / "variants"), *load(CORPUS / "exam")]
    lines = sorted({line for case in cases for text in case.raw.values() if isinstance(text, str) for line in text.split("\n")})
    catalogue = load_catalogue()
    cues = Cues(literals=catalogue.noted)
    missed = []
    for start in range(0, len(lines), at_once):
        part = lines[start : start + at_once]
        rows = cues.rows([line.encode() for line in part])
        missed += [line for row, line in enumerate(part) if row not in rows and catalogue.may_note(line)]
    assert len(lines) > 5000
    noted = [line for line in missed if any(not p.frequent for source in LOGS for p, _fields in catalogue.matches(line, source))]
    assert noted == []


def test_a_storm_is_kept_as_such_and_what_comes_after_it_too() -> None:
    """Of a line that is there 30,000 times MANY are kept; another one in the middle, and the log's end, are all there."""
    storm = [OOM.format(n=number) for number in range(30_000)]
    storm[15_000] = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"
    kept = read_evidence("\n".join(storm))
    numbers = {item.line for item in kept}
    assert MANY <= len(kept) < len(storm) // 2
    assert 15_001 in numbers
    assert set(range(29_900, 30_001)) <= numbers
    assert kept == sorted(kept, key=lambda item: item.line)


def test_a_long_journal_keeps_what_systemd_and_the_kernel_say() -> None:
    """A file of the whole journal, larger than what is read whole: the reboot and the unit's end are in it, not the engine's words alone."""
    stamp = "Apr 14 16:23:21 box"
    lines = [f"{stamp} vllm[5]: {line}" for line in prose(6000)]
    told = {
        2000: f"{stamp} systemd[1]: vllm.service: Main process exited, code=dumped, status=6/ABRT",
        3000: "-- Reboot --",
        4000: f"{stamp} systemd[1]: Started vllm.service - vLLM.",
        5000: f"{stamp} kernel: AMD-Vi: Event logged [IO_PAGE_FAULT device=09:00.0 domain=0x000e address=0xfffffffdf8000000 flags=0x0008]",
    }
    for number, line in told.items():
        lines[number - 1] = line
    text = "\n".join(lines)
    assert len(text) > 600_000
    assert set(told) <= {item.line for item in read_evidence(text)}


def test_the_last_fault_after_a_storm_of_its_like_is_the_one_that_is_judged() -> None:
    """The same sentence, survived ten thousand times and then not: the end is read as if nothing had been seen before."""
    lines = [line for number in range(10_000) for line in (OOM.format(n=1), TRAFFIC.format(n=number % 250))]
    lines += [*map(TRAFFIC.format_map, [{"n": number % 250} for number in range(30_000)])]
    lines += ["[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):", OOM.format(n=48)]
    verdict = diagnose(read_evidence("\n".join(lines)))
    assert verdict.cause in (Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME)
    assert len(lines) in {item.line for item in read_evidence("\n".join(lines))}


def test_prompts_cost_no_judgement_once_their_beginning_is_known() -> None:
    """Lines that an engine logs with a client's text in them are told by what stands before it."""
    head = "[2026-08-16 09:41:37] Receive: obj=GenerateReqInput(rid='77', text='Fatal Python error: "
    sieve = Sieve(load_catalogue())
    assert sieve.rows("\n".join(prose(50, head)).encode()) == []
    assert sieve._heads
    known = len(sieve._dull)
    assert sieve.rows("\n".join(prose(5000, head)).encode()) == []
    assert len(sieve._dull) == known


@pytest.mark.parametrize("before", ["", "[2026-08-16 09:41:37] Receive: obj=GenerateReqInput(rid='77', text='"])
def test_lines_that_never_repeat_are_read_at_more_than_10_mb_a_second(before: str) -> None:
    """A tenth of what it does on a quiet machine: what would fail here is a step that looks at each of them many times."""
    log = "\n".join(prose(30_000, before)).encode()
    began_s = time.process_time()
    read_evidence(log)
    assert len(log) / (time.process_time() - began_s) > 10e6
