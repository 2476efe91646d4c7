"""Files as people have them: wrappers, encodings, compression, sizes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, exit_evidence, read_evidence
from appliance.diagnosis.reading.decode import LONGEST_LINE_BYTES, UnreadableLog

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB"
XID = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
NOW_S = 1_787_000_000.0  # August 2026


@pytest.mark.parametrize(
    ("line", "source", "text"),
    [
        (f"Aug 27 14:03:48 box kernel: {XID}", Source.KERNEL_LOG, XID),
        (f"2026-08-27T14:03:48+0200 box kernel: {XID}", Source.KERNEL_LOG, XID),
        (f"Thu 2026-08-27 14:03:48.123456 CEST box kernel: {XID}", Source.KERNEL_LOG, XID),
        (f"[ 7460.702000] {XID}", Source.KERNEL_LOG, XID),
        (f"[ 7460.702000] [   T1234] {XID}", Source.KERNEL_LOG, XID),
        (f"<4>[ 7460.702000] {XID}", Source.KERNEL_LOG, XID),
        (f"[Sun Feb 23 16:34:18 2025] {XID}", Source.KERNEL_LOG, XID),
        (f"kern  :warn  : 2025-01-21T04:51:44,283302+00:00 {XID}", Source.KERNEL_LOG, XID),
        (f"4,1227,7460702000,c;{XID}", Source.KERNEL_LOG, XID),
        (XID, Source.KERNEL_LOG, XID),
        (f"kwi 15 07:56:59 box kernel: {XID}", Source.KERNEL_LOG, XID),
        (
            "Oct 13 22:40:12 box systemd[1]: a.service: Watchdog timeout (limit 1min)!",
            Source.SYSTEMD,
            "a.service: Watchdog timeout (limit 1min)!",
        ),
        ("-- Boot 0000000000000000000000000000000b --", Source.SYSTEMD, "-- Boot 0000000000000000000000000000000b --"),
        ("Result=oom-kill", Source.SYSTEMD, "Result=oom-kill"),
        (f"Apr 29 12:41:28 box sglang[8120]: {OOM}", Source.ENGINE_LOG, OOM),
        (f"10月 19 22:21:15 gpu ollama[60399]: {OOM}", Source.ENGINE_LOG, OOM),
        (f"2026-08-16T09:41:40.123456789Z {OOM}", Source.ENGINE_LOG, OOM),
        (f"2026-08-16T09:41:40.123456789Z stderr F {OOM}", Source.ENGINE_LOG, OOM),
        (f"[pod/vllm-0/vllm] {OOM}", Source.ENGINE_LOG, OOM),
        (f"vllm-sm120  | {OOM}", Source.ENGINE_LOG, OOM),
        (f"\x1b[36m{OOM}\x1b[0m\r", Source.ENGINE_LOG, OOM),
        (json.dumps({"log": OOM + "\n", "stream": "stderr", "time": "2026-08-16T09:41:40.1Z"}), Source.ENGINE_LOG, OOM),
        (
            json.dumps({"MESSAGE": XID, "_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel", "__REALTIME_TIMESTAMP": "1750000000000000"}),
            Source.KERNEL_LOG,
            XID,
        ),
        (json.dumps({"MESSAGE": list(XID.encode()), "SYSLOG_IDENTIFIER": "kernel", "__REALTIME_TIMESTAMP": "1"}), Source.KERNEL_LOG, XID),
        (
            json.dumps(
                {"MESSAGE": "Xid (PCI:0000:01:00): 79", "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "1", "__REALTIME_TIMESTAMP": "1"}
            ),
            Source.ENGINE_LOG,
            "Xid (PCI:0000:01:00): 79",
        ),
        (f"192.168.11.119: kern: warning: [2026-04-22T21:25:20.505406921Z]: {XID}", Source.KERNEL_LOG, XID),
        (json.dumps({"timestamp": "2024-05-01T10:00:00Z", "level": "ERROR", "fields": {"message": OOM}}), Source.ENGINE_LOG, OOM),
        (f"[2026-08-16 09:41:40 TP0] {OOM}", Source.ENGINE_LOG, f"[2026-08-16 09:41:40 TP0] {OOM}"),
    ],
)
def test_a_line_loses_its_wrapper_and_finds_its_source(line: str, source: Source, text: str) -> None:
    """journald short, iso, full and json; dmesg in five forms, Talos; kmsg; docker, Kubernetes, compose; colours; CRLF."""
    (item,) = read_evidence(line, now_s=NOW_S)
    assert (item.source, item.text) == (source, text)


@pytest.mark.parametrize(
    ("line", "stamp", "missing"),
    [
        ("2026-08-16T09:41:40.500Z x", 1786873300.5, set()),
        ("2026-08-16T11:41:40+02:00 box python[1]: x", 1786873300.0, set()),
        ("[2026-08-16 09:41:40 TP0] x", 1786873300.0, {"zone_unknown"}),
        ("Aug 16 09:41:40 box python[1]: x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("(EngineCore pid=1) ERROR 08-16 09:41:40 [core.py:1] x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("[rank0]:[E816 09:41:40.500000000 ProcessGroupNCCL.cpp:629] x", 1786873300.5, {"zone_unknown", "year_unknown"}),
        ("août 16 09:41:40 box python[1]: x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("Aug. 16 09:41:40 box python[1]: x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("8月 16 09:41:40 box python[1]: x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("авг 16 09:41:40 box python[1]: x", 1786873300.0, {"zone_unknown", "year_unknown"}),
        ("[GIN] 2026/08/16 - 09:41:40 | 200 | x", 1786873300.0, {"zone_unknown"}),
        ("slot 16 09:41:40 x", None, set()),
        ("no time at all", None, set()),
        ("Feb 31 09:41:40 box python[1]: x", None, set()),
    ],
)
def test_times_say_what_they_leave_out(line: str, stamp: float | None, missing: set[str]) -> None:
    """A year or zone that the program leaves out is filled in, and marked."""
    (item,) = read_evidence(line, now_s=NOW_S)
    assert item.time_s == stamp
    assert set(item.data) - {"host"} == missing


def test_a_mixed_journal_is_taken_apart() -> None:
    """One file of the whole journal gives kernel, systemd and engine evidence, and one verdict."""
    journal = "\n".join(
        [
            f"Aug 27 14:03:48 box kernel: {XID}",
            "Aug 27 14:03:50 box vllm[5]: torch.AcceleratorError: CUDA error: unspecified launch failure",
            "Aug 27 14:03:51 box systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE",
        ]
    )
    evidence = read_evidence(journal, now_s=NOW_S)
    assert [item.source for item in evidence] == [Source.KERNEL_LOG, Source.ENGINE_LOG, Source.SYSTEMD]
    assert diagnose(evidence).cause.label == "gpu_off_bus"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress], ids=["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_packed_and_wide_files_read_the_same(tmp_path: Path, pack: object, encoding: str) -> None:
    """Compression and UTF-16, with a byte-order mark or without."""
    path = tmp_path / "log"
    path.write_bytes(pack((f"ready\n{OOM}\n" * 3).encode(encoding)))  # type: ignore[operator]
    assert [item.text for item in read_evidence(path)][1] == OOM


def test_two_joined_archives_are_one_log() -> None:
    """logrotate's pieces may be concatenated."""
    joined = gzip.compress(b"one\n") + gzip.compress(b"two\n")
    assert [item.text for item in read_evidence(joined)][:2] == ["one", "two"]


def test_a_broken_archive_says_so() -> None:
    """Cut compressed data is refused with the cure, not read as text."""
    with pytest.raises(UnreadableLog, match="decompressed"):
        read_evidence(gzip.compress(OOM.encode() * 1000)[:-20])


def test_bytes_that_are_no_text_do_not_stop_the_reader() -> None:
    """Invalid UTF-8, NULs, control characters and lone surrogates around a line that matters."""
    raw = b"\xff\xfe\xfd bad\n\x00\x01\x02\n" + OOM.encode() + b"\n\xed\xa0\x80\n"
    assert diagnose(read_evidence(raw, Source.ENGINE_LOG)).cause.label.startswith("cuda_oom")


def test_a_ten_megabyte_line_keeps_its_two_ends() -> None:
    """A dumped tensor in one line costs neither memory nor the line's own head and tail."""
    raw = b"head " + b"x" * 10_000_000 + b" tail\n" + OOM.encode() + b"\n"
    evidence = read_evidence(raw)
    assert max(len(item.text) for item in evidence) <= LONGEST_LINE_BYTES + 100
    assert evidence[0].text.startswith("head ")
    assert evidence[0].text.endswith(" tail")
    assert diagnose(evidence).cause.label.startswith("cuda_oom")


def test_a_long_log_gives_its_crash_with_the_right_line_number(tmp_path: Path) -> None:
    """The sieve keeps a crash in the middle, what stood before it, both ends, and the numbers of the lines."""
    batch = "[2026-08-16 09:41:20 TP0] Decode batch, #running-req: {}, #token: 1210, token usage: 0.01, gen throughput (token/s): 44.10"
    lines = [batch.format(number) for number in range(20_000)]
    lines[9_999] = "[2026-08-16 09:41:31 TP0] Prefill batch, #new-seq: 1, #new-token: 4096"
    lines[10_000:10_000] = ["[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):", OOM]
    path = tmp_path / "engine.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    evidence = read_evidence(path)
    assert len(evidence) < 500
    assert all(lines[item.line - 1] == item.text for item in evidence)
    verdict = diagnose(evidence)
    assert verdict.root is not None
    assert verdict.root.line == lines.index(OOM) + 1
    assert diagnose(read_evidence(("\n".join(lines[:9_000])).encode())).cause.label == "ok_normal"


def test_progress_counts_the_bytes_read() -> None:
    """The callback sees growing totals that end at the size."""
    seen: list[int] = []
    read_evidence(io.BytesIO(b"a line of a log\n" * 200_000), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 16 * 200_000


@pytest.mark.parametrize(("word", "signal"), [("137", "SIGKILL"), ("-11", "SIGSEGV"), ("SIGQUIT", "SIGQUIT"), ("term", "SIGTERM")])
def test_an_exit_is_given_as_code_or_signal(word: str, signal: str) -> None:
    """`--exit 137`, `-11`, `SIGQUIT` and `term` mean signals."""
    assert diagnose([exit_evidence(word)]).chain[0].citation.source is Source.EXIT
    assert signal in str(exit_evidence(word).data.values()) or word.lstrip("-").isdigit()


def test_a_word_that_is_no_exit_is_refused() -> None:
    """The message names the word and what is legal."""
    with pytest.raises(ValueError, match=r"SIGNOPE.*137"):
        exit_evidence("SIGNOPE")
