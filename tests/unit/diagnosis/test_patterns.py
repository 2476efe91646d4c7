"""Every pattern is proved by its own samples."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line, load_catalogue, read_evidence, with_operator_patterns
from appliance.diagnosis.catalogue import LOGS, LONGEST_LINE
from appliance.diagnosis.cues import Cues
from appliance.diagnosis.pattern import Pattern, PatternError, load_patterns
from appliance.diagnosis.scan import has_word
from tests.unit.diagnosis.wordings import wordings

CATALOGUE = load_catalogue()
SAMPLES = [(pattern, sample) for pattern in CATALOGUE.patterns for sample in pattern.samples]


def _name(value: object) -> str:
    return value.pattern_id if isinstance(value, Pattern) else ""


@pytest.mark.parametrize(("pattern", "sample"), SAMPLES, ids=_name)
def test_each_sample_is_matched_by_its_own_pattern(pattern: Pattern, sample: str) -> None:
    """Through the catalogue's gate and literals, in every source the pattern claims."""
    for source in pattern.sources:
        found = [match.pattern_id for match, _fields in CATALOGUE.matches(sample, source)]
        assert pattern.pattern_id in found, f"{pattern.pattern_id} does not match {sample!r} in {source}; matched by {found}"


@pytest.mark.parametrize("pattern", CATALOGUE.patterns, ids=_name)
def test_the_literals_let_every_wording_through(pattern: Pattern) -> None:
    """Whatever the regular expression knows carries one of the literals: the gate loses nothing, samples or not."""
    lost = [wording for wording in wordings(pattern.regex) if not any(literal in wording for literal in pattern.literals)]
    assert not lost, f"{pattern.pattern_id}: no literal for {lost[:5]}"


CUES = Cues(literals=CATALOGUE.noted)


@pytest.mark.parametrize(
    "pattern", [pattern for pattern in CATALOGUE.patterns if not pattern.frequent and not pattern.sources.isdisjoint(LOGS)], ids=_name
)
def test_the_scan_of_long_logs_stops_at_every_wording(pattern: Pattern) -> None:
    """Of whatever a log may hold (a whole journal holds all of it) and healthy engines do not print all the time."""
    lost = [wording for wording in wordings(pattern.regex) if not CUES.rows([wording.encode()])]
    assert not lost, f"{pattern.pattern_id}: the scan would pass over {lost[:5]}"


def test_fatal_patterns_answer_the_online_question() -> None:
    """`is_fatal_line` gives an id for fatal samples and none for healthy lines."""
    assert is_fatal_line("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB.") == "torch.cuda_oom"
    assert is_fatal_line("[2026-08-16 09:41:20 TP0] Decode batch, #running-req: 1, #token: 1210") is None
    assert is_fatal_line("INFO:     Application startup complete.") is None
    for pattern in CATALOGUE.patterns:
        if pattern.fatal and Source.ENGINE_LOG in pattern.sources:
            assert all(is_fatal_line(sample) or "WARNING" in sample for sample in pattern.samples), pattern.pattern_id


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.HTTPError: 401 Client Error. (Request ID: Root=1)",
        "OSError: [Errno 24] Too many open files",
        "FileNotFoundError: No such file or directory: nope.safetensors",
        "jinja2.exceptions.UndefinedError: 'dict object' has no attribute 'content'",
        "ValueError: The input (119004 tokens) is longer than the model's context length (102400 tokens).",
        "WARNING Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.",
        "KV cache pool is full. Retract requests. #retracted_reqs: 1",
        "asyncio.exceptions.CancelledError",
        "No available shared memory broadcast block found in 60 seconds.",
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 838447104",
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
        'INFO:     127.0.0.1:40140 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
        "INFO:     Finished server process [1]",
        "MemoryError: ",
        "[2026-11-30 10:00:00] WARNING One request was refused: CUDA out of memory. Tried to allocate 48.00 MiB.",
        "(EngineCore pid=5) WARNING 04-19 12:31:04 [core.py:1] Segmentation fault of a helper",
    ],
)
def test_what_an_engine_survives_is_not_fatal(line: str) -> None:
    """The supervisor kills on a fatal line: one request's trouble, a retry or a warning must not be one."""
    assert is_fatal_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        "[2026-08-16 09:41:40] SIGQUIT received. signum=3, frame=None. It usually means one child failed.",
        "(EngineCore pid=229) ERROR 04-19 12:31:04 [core.py:1134] EngineCore encountered a fatal error.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "Fatal Python error: Segmentation fault",
        "[2026-11-30 10:00:00] ERROR Engine loop failed: MemoryError: ",
        "RuntimeError: Prefill out of memory. Try to lower your batch size.",
        "ggml-cuda.cu:132: CUDA error",
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600086 milliseconds",
    ],
)
def test_what_ends_an_engine_is_fatal(line: str) -> None:
    """So that its group is emptied at once, not after its own minute of dying."""
    assert is_fatal_line(line) is not None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('regex = ".*boom"', "catch-all"),
        ('regex = "a.*b.*c.*d.*e"', "catch-alls"),
        ('regex = "(x)?"', "empty line"),
        ('regex = "(["', "unterminated"),
        ('event = "no_such_event"', "vocabulary"),
        ('literals = ["x"]', "shorter than"),
        ('cause = "no_such_label"', "no_such_label"),
        ("samples = []", "missing"),
        ('colour = "red"', "unknown"),
        ('samples = ["bang"]', "its own sample 'bang'"),
    ],
)
def test_a_bad_pattern_is_refused_with_its_name(tmp_path: Path, change: str, says: str) -> None:
    """An operator's greedy, empty, unknown or unproved pattern is left out; the sentence names file, pattern and fault."""
    good = {
        "id": '"mine.boom"', "kind": '"cause"', "event": '"disk_full"', "cause": '"disk_full"', "source": '"my program"',
        "literals": '["boom"]', "regex": '"boom"', "samples": '["boom"]',
    }  # fmt: skip
    key, _, value = change.partition(" = ")
    rows = "\n".join(f"{name} = {text}" for name, text in {**good, key: value}.items())
    (tmp_path / "mine.toml").write_text(f"[[pattern]]\n{rows}\n")
    catalogue, problems = with_operator_patterns(tmp_path)
    assert catalogue is CATALOGUE
    (problem,) = problems
    assert str(tmp_path / "mine.toml") in problem
    assert "mine.boom" in problem
    assert says in problem


BOOM = """
[[pattern]]
id = "mine.boom"
kind = "cause"
event = "disk_full"
cause = "disk_full"
tier = 2
source = "my program"
literals = ["qq7"]
regex = "qq7 boom"
samples = ["it went qq7 boom"]
"""


def test_an_operators_pattern_is_used(tmp_path: Path) -> None:
    """A file in an operator's directory adds to ours; one that is wrong costs itself alone, as does one with our own ids."""
    (tmp_path / "a.toml").write_text("[[pattern")
    (tmp_path / "b.toml").write_text(BOOM)
    (tmp_path / "c.toml").write_text(BOOM)
    (tmp_path / "notes.txt").write_text("no pattern file")
    catalogue, problems = with_operator_patterns(tmp_path)
    assert [pattern.pattern_id for pattern, _fields in catalogue.matches("it went qq7 boom", Source.ENGINE_LOG)] == ["mine.boom"]
    assert [Path(problem.split(" ")[0]).name for problem in problems] == ["a.toml", "c.toml"]
    assert "'mine.boom'" in problems[1]
    assert diagnose([Evidence(Source.ENGINE_LOG, "it went qq7 boom")], catalogue=catalogue).cause is Cause.DISK_FULL


def test_an_operators_words_are_found_in_a_long_log(tmp_path: Path) -> None:
    """The scan of a large log does not know them; the pattern's literals are added to its words."""
    (tmp_path / "b.toml").write_text(BOOM)
    catalogue, _problems = with_operator_patterns(tmp_path)
    assert not has_word(b"it went qq7 boom")
    log = [f"step {number} " + "abcdefghij"[number % 10] * (number % 7) + " ok" for number in range(3000)]
    text = "\n".join([*log[:1500], "it went qq7 boom", *log[1500:]])
    evidence = read_evidence(text, Source.ENGINE_LOG, catalogue=catalogue)
    assert diagnose(evidence, catalogue=catalogue).cause is Cause.DISK_FULL


def test_no_folder_is_no_problem(tmp_path: Path) -> None:
    """Most machines have none; something else in its place is told."""
    assert with_operator_patterns(None) == with_operator_patterns(tmp_path / "none") == (CATALOGUE, ())
    (tmp_path / "file").touch()
    assert with_operator_patterns(tmp_path / "file")[1] == (f"{tmp_path / 'file'}: Not a directory; the patterns in it are not used",)


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    """The path stands in the error."""
    path = tmp_path / "broken.toml"
    path.write_text("[[pattern")
    with pytest.raises(PatternError, match=r"broken\.toml"):
        load_patterns(path)


@pytest.mark.parametrize("pattern", CATALOGUE.patterns, ids=_name)
def test_no_pattern_takes_long_on_a_hostile_line(pattern: Pattern) -> None:
    """The longest line a pattern may see, made of its own beginnings: under 60 ms (a busy machine), not seconds."""
    for base in (*pattern.samples, *pattern.literals):
        for line in (
            base * 200,
            base[: len(base) // 2] * 200 + base,
            base + "a" * LONGEST_LINE,
            "x " * 2000 + base[:-2] + "." * LONGEST_LINE,
        ):
            began = time.process_time()
            pattern.search(line[:LONGEST_LINE])
            assert time.process_time() - began < 0.06, f"{pattern.pattern_id} on {line[:60]!r}..."
