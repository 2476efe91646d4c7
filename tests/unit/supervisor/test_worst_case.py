"""One run of the longest prompt against a server of our own, and what is read out of the looks."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from appliance.backends import ProofRequest
from appliance.backends.native import PROOF
from appliance.backends.protocol import plain_ids
from appliance.core.units import MIB
from appliance.supervisor.memory_room import ADDRESSES, MEMORY, Look
from appliance.supervisor.worst_case import Outcome, Pool, WorstCase, read
from tests.unit.supervisor.test_probe import ok, server, spec_of

LIMIT = "memory.max of unit"


def cpu(held_mib: int, free_mib: int, addresses_mib: int | None = None) -> Look:
    """A look at an engine on the CPU."""
    own = {} if addresses_mib is None else {ADDRESSES: addresses_mib * MIB}
    return Look({MEMORY: free_mib * MIB} | own, held_mib * MIB)


def test_the_kv_cache_of_the_cpu_engine_is_told_from_the_peak() -> None:
    """It grew by 150 MiB: 100 are the prompt in the cache, 50 the peak; 400 MiB of the cache are still to come."""
    found = read([cpu(200, 1000), cpu(350, 850), cpu(300, 900)], 1000, Pool(500 * MIB, MIB // 10))
    assert found is not None
    assert (round(found.peak_bytes / MIB), round(found.left_bytes / MIB), found.scarce) == (50, 450, MEMORY)


def test_pages_that_an_earlier_prompt_wrote_are_not_taken_off_the_peak() -> None:
    """The run before was cut short after 80 MiB of its prompt: these stay, and this prompt is written over them."""
    found = read([cpu(280, 920), cpu(350, 850), cpu(300, 900)], 1000, Pool(500 * MIB, MIB // 10))
    assert found is not None
    assert (round(found.peak_bytes / MIB), round(found.left_bytes / MIB)) == (50, 450)


def test_no_two_prompts_begin_alike() -> None:
    """A prefix cache holds what a run that was cut short has read: the next one would be answered out of it, and its peak be nothing."""
    prompts = [plain_ids(40) for _ in range(800)]
    assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)
    assert all(one[0] != other[0] for one, other in itertools.pairwise(prompts))
    assert {len(prompt) for prompt in prompts} == {40}
    assert (len(plain_ids(1)), plain_ids(0)) == (1, [])


async def test_what_was_free_before_any_prompt_is_what_counts_on_cards(tmp_path: Path) -> None:
    """The engine kept the buffers of an earlier one."""
    request = ProofRequest("/generate", {"input_ids": [3]}, PROOF.accepts)

    async def look_now() -> Look:
        return Look({"0a:00": 300})

    async with server(tmp_path, ok({"text": "x", "output_ids": [1]}), pause_s=0.1) as endpoint:
        outcome = await WorstCase(request, 1, 5.0).run(spec_of(endpoint), look_now, Look({"0a:00": 1000}))
    assert outcome.reading is not None
    assert (outcome.reading.peak_bytes, outcome.reading.left_bytes) == (700, 300)


def test_a_cache_that_would_not_fit_is_seen_before_it_is_full() -> None:
    """Below nothing: with all of its cache written, the machine would be out of memory."""
    found = read([cpu(200, 300), cpu(350, 150)], 1000, Pool(500 * MIB, MIB // 10))
    assert found is not None
    assert found.left_bytes < 0


def test_address_space_was_taken_for_the_whole_cache_at_the_start() -> None:
    """So that nothing more of it is set aside, and the scarcest place decides."""
    found = read([cpu(200, 1000, 100), cpu(350, 850, 30)], 1000, Pool(500 * MIB, MIB // 10))
    assert found is not None
    assert (found.left_bytes, found.scarce) == (30 * MIB, ADDRESSES)


def test_on_cards_the_engines_own_are_judged() -> None:
    """Two that carry it, and a third that somebody else has filled."""
    before = Look({"0a:00": 1000, "0b:00": 1100, "0c:00": 5})
    after = Look({"0a:00": 300, "0b:00": 500, "0c:00": 5})
    found = read([before, after, before], 99, Pool())
    assert found is not None
    assert (found.peak_bytes, found.left_bytes, found.scarce) == (700, 300, "the card at 0a:00")


@pytest.mark.parametrize("looks", [[], [cpu(1, 1)], [Look({}, 5), Look({}, 5)]])
def test_what_was_not_looked_at_is_not_judged(looks: list[Look]) -> None:
    """No reading, rather than a wrong one."""
    assert read(looks, 99, Pool()) is None


async def run(folder: Path, answer: bytes, look: Look | None = cpu(1, 100), deadline_s: float = 5.0) -> Outcome:  # noqa: B008
    """One run against a server that gives this answer."""
    request = ProofRequest("/generate", {"input_ids": [3]}, PROOF.accepts)

    async def look_now() -> Look | None:
        return look

    async with server(folder, answer, pause_s=0.1) as endpoint:
        return await WorstCase(request, 1, deadline_s).run(spec_of(endpoint), look_now)


async def test_an_answered_prompt_has_a_reading(tmp_path: Path) -> None:
    """Looked at while it ran."""
    outcome = await run(tmp_path, ok({"text": "x", "output_ids": [1]}))
    assert outcome.reading is not None
    assert (outcome.problem, outcome.cannot, outcome.broke) == ("", "", "")


async def test_memory_that_cannot_be_looked_at_is_no_reading(tmp_path: Path) -> None:
    """An NVML that does not answer: the prompt was answered, and that is all."""
    assert await run(tmp_path, ok({"text": "x", "output_ids": [1]}), look=None) == Outcome(1)


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (ok({"error": "no ids here"}, 400), "cannot"),
        (ok({"error": "?"}, 404), "cannot"),
        (ok({"error": {"code": "generation_failed"}}, 503), "problem"),
        (ok({"error": "?"}, 500), "problem"),
        (ok({"text": "x"}), "problem"),
        (b"", "broke"),
        (b"nonsense\r\n\r\n", "broke"),
    ],
)
async def test_other_answers_are_told_apart(tmp_path: Path, answer: bytes, field: str) -> None:
    """It does not take the prompt (nothing is known); it took it and failed (refused); it broke (dead, or it hangs)."""
    outcome = await run(tmp_path, answer)
    said = {name: getattr(outcome, name) for name in ("problem", "cannot", "broke")}
    assert [name for name, words in said.items() if words] == [field], said
    assert json.dumps(said)


async def test_a_run_that_is_cancelled_closes_its_connection(tmp_path: Path) -> None:
    """That is how the engine learns that nobody waits for the prompt any more."""
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    from appliance.core.launch import Endpoint

    listening = await asyncio.start_unix_server(talk, tmp_path / "s")
    request = ProofRequest("/generate", {"input_ids": [3]}, PROOF.accepts)

    async def look() -> Look | None:
        return cpu(1, 100)

    task = asyncio.create_task(WorstCase(request, 1, 60.0).run(spec_of(Endpoint(socket_path=str(tmp_path / "s"))), look))
    await asyncio.sleep(0.05)
    task.cancel()
    async with asyncio.timeout(5):
        await gone.wait()
    listening.close()
