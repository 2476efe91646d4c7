"""The OOM killer's lines are a cause only where they name a process of the engine."""

# ruff: noqa: E501 (kernel lines are quoted as they are printed)

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, exit_evidence, read_evidence

MEMCG = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg={group},task_memcg={group},task={name},pid={pid},uid=0"
KILLED = "Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:9000000kB, anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB"
ILLEGAL = (
    "[2026-03-03 10:31:52 TP0] Decode batch, #running-req: 1, #token: 1210\n"
    "[2026-03-03 10:31:52] Scheduler hit an exception: Traceback (most recent call last):\n"
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    "[2026-03-03 10:31:52] SIGQUIT received. signum=3, frame=None. It usually means one child failed.\n"
)
SERVING = 'INFO:     Started server process [4110]\nINFO:     Application startup complete.\nINFO:     10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'


def killed(name: str, pid: int, group: str = "/docker/9b") -> str:
    """The kernel's two lines about one kill in a control group."""
    return "\n".join(f"[ 701.{number}] {line.format(name=name, pid=pid, group=group)}" for number, line in enumerate((MEMCG, KILLED), 10))


def verdict(engine: str = "", kernel: str = "", systemd: str = "", exit_word: str | None = None) -> Diagnosis:
    """Of files, as `diagnose` reads them."""
    given = ((engine, Source.ENGINE_LOG), (kernel, Source.KERNEL_LOG), (systemd, Source.SYSTEMD))
    evidence = [item for text, source in given if text for item in read_evidence(text, source)]
    return diagnose([*evidence, *([exit_evidence(exit_word)] if exit_word else [])])


@pytest.mark.parametrize("name", ["postgres", "python3", "jupyter-noteboo"])
@pytest.mark.parametrize("exit_word", [None, "1", "137"])
def test_another_containers_kill_is_no_cause_beside_the_engines_own_account(name: str, exit_word: str | None) -> None:
    """It shares a name with the engine, or does not: the engine says what it died of, and 137 is SGLang killing its own tree."""
    found = verdict(ILLEGAL, killed(name, 1190), exit_word=exit_word)
    assert found.cause is Cause.CUDA_ILLEGAL_ACCESS
    assert Cause.HOST_OOM in {item.cause for item in found.refuted}


def test_a_global_kill_of_somebody_else_is_context_for_an_engine_that_died_of_its_own_fault() -> None:
    """CONSTRAINT_NONE took a program called python; the engine was ended by SIGSEGV."""
    kernel = "[ 9.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=python3,pid=77,uid=1000"
    assert verdict(SERVING, kernel, exit_word="SIGSEGV").cause is Cause.SEGFAULT_NATIVE


def test_what_the_engine_had_survived_is_no_account_of_its_end() -> None:
    """One request ran out of the card's memory, others were served after it; then the kernel killed the engine's child."""
    trouble = "ERROR One request was refused: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert verdict(SERVING + trouble + SERVING, killed("python3", 99), exit_word="137").cause is Cause.HOST_OOM


def test_the_engines_own_number_settles_it() -> None:
    """Its log names the process that the kernel killed."""
    found = verdict(SERVING, killed("my-server", 4110), exit_word="137")
    assert (found.cause, found.confidence) == (Cause.HOST_OOM, Confidence.HIGH)


def test_the_killed_child_and_not_the_condemned_parent_counts() -> None:
    """Kernels before 5.0 name whom they chose, and then the child that they took in its place."""
    kernel = "[ 9.1] Out of memory: Kill process 800 (bash) score 912 or sacrifice child\n[ 9.2] Killed process 812 (python3) total-vm:1kB, anon-rss:1kB"
    assert verdict("Killed\n", kernel, exit_word="137").cause is Cause.HOST_OOM


def test_another_units_process_is_none_of_the_engines() -> None:
    """systemd says which unit is the engine's, the kernel in which one it killed: a notebook server's python3."""
    systemd = "Feb 08 00:50:09 box systemd[1]: sglang.service: Main process exited, code=killed, status=9/KILL\n"
    other = "Feb 08 00:50:07 box systemd[1]: jupyter.service: A process of this unit has been killed by the OOM killer.\n"
    foreign = verdict(SERVING, killed("python3", 99, "/system.slice/jupyter.service"), other + systemd)
    assert foreign.cause is Cause.KILLED_UNKNOWN
    own = verdict(SERVING, killed("python3", 99, "/system.slice/sglang.service"), systemd)
    assert (own.cause, own.confidence) == (Cause.HOST_OOM, Confidence.HIGH)


def test_an_engine_that_works_on_was_not_killed() -> None:
    """Its next request is minutes later, by the same clock."""
    kernel = "2026-03-03T10:00:00.000000+00:00 box kernel: " + KILLED.format(pid=99, name="python3")
    engine = "2026-03-03T09:58:00Z INFO:     Application startup complete.\n2026-03-03T10:09:00Z " + SERVING.splitlines()[-1]
    assert verdict(engine, kernel).cause is Cause.OK_NORMAL


@pytest.mark.parametrize(("of_engine", "cause"), [(True, Cause.HOST_OOM), (False, Cause.UNKNOWN)])
def test_what_started_the_engine_knows_its_processes(of_engine: bool, cause: Cause) -> None:
    """applianced marks the line; names count no more then."""
    kill = Evidence(
        Source.KERNEL_LOG, KILLED.format(pid=99, name="python3" if not of_engine else "anything"), 5.0, data={"of_engine": of_engine}
    )
    assert diagnose([kill, Evidence(Source.EXIT, "", 5.0, data={"code": 1})]).cause is cause


def test_a_container_runtimes_client_leaves_with_137() -> None:
    """The engine runs in a container: its processes are not ours, and were killed all the same."""
    lines = [
        Evidence(
            Source.KERNEL_LOG, line.format(pid=99, name="python3", group="/system.slice/docker-9b.scope"), 5.0, data={"of_engine": False}
        )
        for line in (MEMCG, KILLED)
    ]
    assert diagnose([*lines, Evidence(Source.EXIT, "", 5.0, data={"code": 137})]).cause is Cause.HOST_OOM
    assert diagnose([*lines, Evidence(Source.EXIT, "", 5.0, data={"signal": "SIGKILL"})]).cause is Cause.KILLED_UNKNOWN


UNIT = "Jun 28 08:06:03 box systemd[1]: ollama.service: A process of this unit has been killed by the OOM killer.\n"
RESULT = "Jun 28 08:06:04 box systemd[1]: ollama.service: Failed with result 'oom-kill'.\n"


@pytest.mark.parametrize(
    "said",
    [
        UNIT,
        RESULT,
        UNIT.replace(
            "A process of this unit has been killed by the OOM killer", "The kernel OOM killer killed some processes in this unit"
        ),
    ],
)
@pytest.mark.parametrize("group", ["user.slice", "system.slice", "app.slice"])
@pytest.mark.parametrize("first", [True, False])
def test_a_slice_s_line_takes_nothing_from_the_unit_s_own(said: str, group: str, first: bool) -> None:
    """A slice is a parent, no foreigner."""
    other = f"Jun 28 08:05:21 box systemd[1]: {group}: A process of this unit has been killed by the OOM killer.\n"
    assert verdict(systemd=other + said if first else said + other).cause is Cause.HOST_OOM


def test_another_unit_s_kill_is_no_cause_while_the_engine_lives() -> None:
    """gitlab's runner was killed; the engine serves."""
    other = RESULT.replace("ollama", "gitlab-runner")
    assert verdict(SERVING, systemd=other).cause is Cause.OK_NORMAL
    assert verdict(ILLEGAL, systemd=other).cause is Cause.CUDA_ILLEGAL_ACCESS


def test_of_several_kills_the_engine_s_own_is_the_root() -> None:
    """By its number; else by the time of the engine's end."""
    own = verdict(SERVING, killed("python3", 77) + "\n" + killed("python3", 4110), exit_word="137")
    assert own.root is not None and "4110" in own.root.text
    engine = "[2026-03-03 10:31:52 TP0] Decode batch, #running-req: 1, #token: 1210\n[2026-03-03 10:31:53] Subprocess scheduler_0 crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    printed = [item for item in read_evidence(engine, Source.ENGINE_LOG) if item.time_s]
    end_s = printed[-1].time_s or 0.0
    kills = [
        Evidence(
            Source.KERNEL_LOG, f"Out of memory: Killed process {pid} (python3) total-vm:1kB", end_s - before_s, pid, data=printed[-1].data
        )
        for pid, before_s in ((1, 80.0), (2, 0.5))
    ]
    found = diagnose([*printed, *kills])
    assert found.cause is Cause.HOST_OOM and found.root is not None and "process 2 " in found.root.text
