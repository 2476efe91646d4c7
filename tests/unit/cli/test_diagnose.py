"""`diagnose` of files: every way in, both ways out."""

import gzip
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import zstandard

ROOT = Path(__file__).parents[3]
OOM = (ROOT / "tests" / "corpus" / "001-sglang-prefill-oom-sigquit-500.json").read_text()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An engine's log that ends in an out-of-memory error."""
    path = tmp_path / "engine.log"
    path.write_text(json.loads(OOM)["evidence"]["engine_log"])
    return path


def test_a_log_is_read_without_applianced(ctl, tmp_path: Path, log: Path) -> None:
    """Exit code 1: something crashed; the root with its line."""
    said = ctl("--state-dir", tmp_path / "none", "diagnose", log)
    assert said.code == 1
    assert said.out.startswith("cuda_oom_prefill  (confidence: ")
    assert "engine_log:9" in said.out
    assert "Tried to allocate 48.00 MiB" in said.out


@pytest.mark.parametrize("form", [(), ("--markdown",)])
def test_a_log_cannot_reach_the_terminal(ctl, tmp_path: Path, form: tuple[str, ...]) -> None:
    """A log of any machine may hold what moves the cursor, in eight bits too, or turns the reading around: it is shown."""
    path = tmp_path / "engine.log"
    path.write_text("torch.OutOfMemoryError: CUDA out of memory. \x00\x9b2J\u202e\b Tried to allocate 48.00 MiB\n")
    said = ctl("diagnose", *form, path)
    assert r"\x9b2J\u202e" in said.out
    assert all(line.isprintable() for line in said.out.split("\n"))
    told = ctl("diagnose", "--json", path)
    assert all(line.isprintable() for line in told.out.split("\n"))
    assert "\x9b2J\u202e" in json.dumps(json.loads(told.out), ensure_ascii=False), "as it was in the log, for who reads the JSON"


def test_json_has_the_promised_keys(ctl, log: Path) -> None:
    """docs and scripts rely on them."""
    data = json.loads(ctl("diagnose", "--json", log).out)
    assert {"cause", "confidence", "root", "chain", "refuted", "action", "remedies", "safer_config"} <= set(data)
    assert set(data["root"]) == {"source", "line", "text", "time"}
    assert data["cause"] == "cuda_oom_prefill"


def test_stdin_and_compressed_files_are_read(log: Path, tmp_path: Path) -> None:
    """`zcat | appliancectl diagnose -` needs no zcat."""
    piped = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "diagnose", "--json", "-"],
        cwd=ROOT,
        input=log.read_bytes(),
        capture_output=True,
        timeout=60,
    )
    assert (piped.returncode, json.loads(piped.stdout)["cause"]) == (1, "cuda_oom_prefill")
    packed = tmp_path / "engine.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    read = subprocess.run([sys.executable, "-m", "appliance.cli", "diagnose", "--json", packed], cwd=ROOT, capture_output=True, timeout=60)
    assert json.loads(read.stdout)["cause"] == "cuda_oom_prefill"


def test_several_sources_count_together(ctl, tmp_path: Path) -> None:
    """SIGKILL alone is unexplained; with the kernel's own record it is the host's memory."""
    assert json.loads(ctl("diagnose", "--json", "--exit", "137").out)["cause"] == "killed_unknown"
    kernel = tmp_path / "dmesg"
    kernel.write_text(
        "[ 1000.0] python invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_COMP|__GFP_ZERO), order=0, oom_score_adj=0\n"
        "[ 1000.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=python,pid=9\n"
        "[ 1000.2] Out of memory: Killed process 9 (python) total-vm:52428800kB, anon-rss:31457280kB, file-rss:0kB, shmem-rss:0kB\n"
    )
    said = ctl("diagnose", "--json", "--kernel-log", kernel, "--exit", "SIGKILL")
    assert (said.code, json.loads(said.out)["cause"]) == (1, "host_oom")


def test_a_stop_that_was_asked_for_is_no_crash(ctl) -> None:
    """Exit code 0."""
    assert ctl("diagnose", "--exit", "SIGTERM").code == 1
    said = ctl("diagnose", "--exit", "SIGTERM", "--stopped-by-us", "--json")
    assert (said.code, json.loads(said.out)["cause"]) == (0, "ok_shutdown")


def test_since_leaves_out_what_is_older(ctl, tmp_path: Path) -> None:
    """A crash of last week is not today's; lines without a clock belong to the one before them."""
    old = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() - 7 * 86400))
    path = tmp_path / "engine.log"
    path.write_text(
        f"[{old}] Scheduler hit an exception: Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert json.loads(ctl("diagnose", "--json", path).out)["cause"].startswith("cuda_oom")
    for since in ("1d", time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() - 86400))):
        assert not json.loads(ctl("diagnose", "--json", "--since", since, path).out)["cause"].startswith("cuda_oom")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/file"], "/no/such/file"),
        (["--exit", "SIGNOPE"], "no exit code or signal"),
        (["--since", "yesterday", "--exit", "1"], "write how long ago, such as 10min"),
        (["--json", "--markdown", "--exit", "1"], "exclude each other"),
        (["--stopped-by-us"], "name a FILE"),
        (["--incident", "x", "--exit", "1"], "leave the files out"),
        (["-", "--kernel-log", "-"], "can be read once only"),
    ],
)
def test_wrong_calls_are_exit_code_2_not_a_verdict(ctl, arguments: list[str], words: str) -> None:
    """1 would say that something crashed."""
    said = ctl("diagnose", *arguments)
    assert (said.code, said.out) == (2, "")
    assert words in said.err


def test_a_folder_and_a_torn_archive_are_exit_code_2(ctl, tmp_path: Path, log: Path) -> None:
    """Named, with the reason."""
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(log.read_bytes())[:-20])
    for path in (tmp_path, torn):
        said = ctl("diagnose", path)
        assert said.code == 2, said.out
        assert str(path) in said.err


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00\xff\xfe\x80" * 1000, b"{" * 10_000], ids=["empty", "blank", "binary", "braces"])
def test_any_file_gets_an_answer(ctl, tmp_path: Path, content: bytes) -> None:
    """A verdict or unknown, never a traceback."""
    path = tmp_path / "log"
    path.write_bytes(content)
    said = ctl("diagnose", "--json", path)
    assert said.code in (0, 1)
    assert json.loads(said.out)["cause"]


def test_a_bundle_holds_report_and_evidence_without_secrets(ctl, tmp_path: Path) -> None:
    """A new file; what was taken out is said; one that exists is left alone."""
    path, out = tmp_path / "engine.log", tmp_path / "out.tar.zst"
    path.write_text("api_key=sk-abcdefghijklmnopqrstuvwxyz012345\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    said = ctl("diagnose", path, "--bundle", out)
    assert said.code == 1
    assert "taken out of it: 1 ×" in said.err
    with zstandard.open(out, "rb") as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        files = {entry.name.partition("/")[2]: tar.extractfile(entry).read().decode() for entry in tar}
    assert {"report.txt", "report.json", "evidence/engine_log.log", "redacted.txt"} <= set(files)
    assert "OutOfMemoryError" in files["evidence/engine_log.log"]
    assert not any("sk-abc" in text for text in files.values())
    content = out.read_bytes()
    said = ctl("diagnose", path, "--bundle", out)
    assert "exists already" in said.err
    assert out.read_bytes() == content
    assert sorted(tmp_path.glob(".*partial*")) == []


def test_a_bundle_that_cannot_be_written_is_said(ctl, tmp_path: Path) -> None:
    """The verdict is told all the same."""
    said = ctl("diagnose", "--exit", "SIGSEGV", "--bundle", tmp_path / "none" / "out.tar.zst")
    assert said.out.startswith("segfault_native")
    assert "cannot be written: No such file or directory" in said.err


def test_an_operators_patterns_are_used_and_a_broken_file_is_a_warning(ctl, tmp_path: Path) -> None:
    """The verdict follows the operator's pattern; the warning on stderr names the file and the pattern."""
    folder = tmp_path / "patterns.d"
    folder.mkdir()
    row = 'kind = "cause"\nevent = "disk_full"\ncause = "disk_full"\ntier = 2\nsource = "ours"\nsamples = ["the qq7 is full"]\n'
    (folder / "a.toml").write_text(f'[[pattern]]\nid = "mine.qq7"\nliterals = ["qq7"]\nregex = "qq7 is full"\n{row}')
    (folder / "b.toml").write_text(f'[[pattern]]\nid = "mine.greedy"\nliterals = ["qq8"]\nregex = ".*qq8"\n{row}')
    (tmp_path / "appliance.toml").write_text(f'[diagnosis]\npatterns_dir = "{folder}"\n')
    (tmp_path / "engine.log").write_text("loading\nthe qq7 is full\n")
    said = ctl("--config", tmp_path / "appliance.toml", "diagnose", "--json", tmp_path / "engine.log")
    assert json.loads(said.out)["cause"] == "disk_full"
    assert f"warning: {folder / 'b.toml'} is left out: " in said.err
    assert "mine.greedy" in said.err
    assert ctl("diagnose", "--json", tmp_path / "engine.log").err == ""
