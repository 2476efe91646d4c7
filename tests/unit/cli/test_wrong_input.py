"""Files that are no logs, words that are no words, and outputs that take no more."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUBBISH = random.Random(5).randbytes(20_000)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"\n" * 40, "are blank"),
        (b"\0" * 100_000, "none of its bytes prints anything"),
        (RUBBISH, "is no text"),
        (b"\x7fELF\x02\x01\x01" + RUBBISH[:5000], "is no text"),
        (b"Dear Anna,\nthe tomatoes came up.\nYours, B.\n", "3 lines were read and none is known of any engine"),
        (("id;name;price\n" + "\n".join(f"{n};apple {n};{n}.50" for n in range(9000))).encode(), "9,001 lines were read"),
    ],
    ids=["empty", "newlines", "zeros", "random", "program", "letter", "table"],
)
def test_what_is_no_log_is_called_so(ctl, tmp_path: Path, content: bytes, says: str) -> None:
    """The sentence says what was read and that nothing of an engine was recognised; exit code 1, as for every `unknown`."""
    (tmp_path / "file").write_bytes(content)
    said = ctl("diagnose", "--json", tmp_path / "file")
    verdict = json.loads(said.out)
    assert (said.code, verdict["cause"], verdict["root"]) == (1, "unknown", None)
    assert verdict["sentence"].startswith("Nothing of an engine was recognised: ")
    assert says in verdict["sentence"]
    assert "stdout and stderr" in verdict["remedies"][0]


def test_an_exit_code_beside_a_wrong_file_is_not_forgotten(ctl, tmp_path: Path) -> None:
    """It is all that is known."""
    (tmp_path / "file").write_text("Dear Anna,\n")
    assert "the process exited with code 3" in ctl("diagnose", tmp_path / "file", "--exit", "3").out


@pytest.mark.parametrize("word", ["99999", "256", "-65", "SIGFOO", "1.5", "--1", "²"])
def test_an_impossible_exit_is_refused(ctl, word: str) -> None:
    """With what is possible."""
    said = ctl("diagnose", f"--exit={word}")
    assert said.code == 2
    assert word.lstrip("-") in said.err
    assert "255" in said.err or "SIGKILL" in said.err


@pytest.mark.parametrize("word", ["0", "255", "137", "-9", "-11", "SIGKILL", "kill"])
def test_a_possible_exit_is_taken(ctl, word: str) -> None:
    """Codes, signals by number and by name."""
    assert ctl("diagnose", f"--exit={word}").code in (0, 1)


def test_an_engine_that_nobody_knows_is_refused(ctl, tmp_path: Path) -> None:
    """With those that are known; in whatever case."""
    (tmp_path / "file").write_text("The server is fired up and ready to roll!\n")
    said = ctl("diagnose", tmp_path / "file", "--engine", "foo")
    assert said.code == 2
    assert all(name in said.err for name in ("foo", "sglang", "vllm", "llamacpp", "native"))
    assert ctl("diagnose", tmp_path / "file", "--engine", "SGLang").code == 0


def _run(arguments: list[str], stdout: int) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([sys.executable, "-m", "appliance.cli", *arguments], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, timeout=60)


def test_a_reader_that_leaves_does_not_cost_the_bundle(tmp_path: Path) -> None:
    """`appliancectl diagnose FILE --bundle X | head -0`."""
    (tmp_path / "file").write_text("torch.OutOfMemoryError: CUDA out of memory.\n" * 500)
    reader, writer = os.pipe()
    os.close(reader)
    ended = _run(["diagnose", str(tmp_path / "file"), "--json", "--bundle", str(tmp_path / "out.tar.zst")], writer)
    os.close(writer)
    assert b"Traceback" not in ended.stderr
    assert (tmp_path / "out.tar.zst").stat().st_size > 100


@pytest.mark.parametrize("arguments", [["diagnose", "--exit", "137"], ["config", "show"], ["explain"], ["--help"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(arguments: list[str]) -> None:
    """`appliancectl VERB > /dev/full`."""
    full = os.open("/dev/full", os.O_WRONLY)
    ended = _run(arguments, full)
    os.close(full)
    assert ended.returncode == 1
    assert ended.stderr.decode() == "appliancectl: the output cannot be written: No space left on device\n"


def test_a_closed_stdout_is_no_error() -> None:
    """`appliancectl config show >&-`."""
    ended = subprocess.run(
        ["/bin/sh", "-c", '"$1" -m appliance.cli config show >&-', "sh", sys.executable], cwd=ROOT, stderr=subprocess.PIPE, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("verb", [("top", "--once"), ("bench",)], ids=["top", "bench"])
@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://127.0.0.1:99999", "http://[::1", "http://:80", "http://127.0.0.1:port"])
def test_an_address_that_is_none_is_refused_with_an_example(ctl, verb: tuple[str, ...], url: str) -> None:
    """Ports that there are not and brackets that are not closed too."""
    said = ctl(*verb, "--url", url)
    assert (said.code, said.out) == (1, "")
    assert f"{url!r} is no address of a gateway" in said.err
    assert "http://127.0.0.1:8000" in said.err


@pytest.mark.parametrize("verb", [("top", "--once"), ("bench",)], ids=["top", "bench"])
@pytest.mark.parametrize(
    ("content", "words"),
    [(b"sk-x\xff\n", "it is not ASCII"), (b"", "it is empty"), (b"sk-a\nsk-b\n", "it has 2 lines"), (b"my key\n", "there are spaces")],
)
def test_a_file_without_a_key_is_named_and_not_repeated(ctl, tmp_path: Path, verb: tuple[str, ...], content: bytes, words: str) -> None:
    """It may hold another secret."""
    (tmp_path / "key").write_bytes(content)
    said = ctl(*verb, "--url", "http://127.0.0.1:9", "--api-key-file", tmp_path / "key")
    assert (said.code, said.out) == (1, "")
    assert f"{tmp_path / 'key'} holds no API key: {words}" in said.err
    assert "sk-a\n" not in said.err


@pytest.mark.parametrize("option", [("top", "--interval"), ("bench", "--timeout"), ("bench", "--days")], ids="".join)
@pytest.mark.parametrize("value", ["nan", "-1", "soon", "inf"])
def test_a_number_that_is_none_is_usage(ctl, option: tuple[str, str], value: str) -> None:
    """NaN is in no range, though no comparison finds it outside."""
    said = ctl(*option, value)
    assert (said.code, said.out) == (2, "")
    assert option[1] in said.err


def test_a_name_that_nothing_is_near_is_told_where_the_list_is(ctl) -> None:
    """Not that "run without a name" is near it."""
    assert "`appliancectl explain` without a name lists what is known" in ctl("explain", "--zzqqxx").err
    assert "nearest: --mem-fraction-static" in ctl("explain", "--mem-fraction-statik").err


def test_a_wheelhouse_that_is_not_there_is_refused_before_anything_is_fetched(ctl, tmp_path: Path) -> None:
    """pip would warn, and fetch from elsewhere."""
    said = ctl("--state-dir", tmp_path, "setup", "--demo", "--wheelhouse", tmp_path / "none")
    assert said.code == 2
    assert str(tmp_path / "none") in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_closed_stdin_is_an_empty_one() -> None:
    """As a service manager may start it."""
    ended = subprocess.run(
        ["/bin/sh", "-c", '"$1" -m appliance.cli diagnose - <&-', "sh", sys.executable], cwd=ROOT, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert b"it is empty" in ended.stdout
