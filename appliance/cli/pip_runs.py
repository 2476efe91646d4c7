"""pip of an environment, run so that its user sees how far it is, that a cut download goes on, and that a refusal says why."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from appliance.core.errors import ApplianceError
from appliance.core.units import format_bytes
from appliance.core.versions import version_of
from appliance.orphans import ends_with_us

RESUMES_SINCE = (25, 1)
"""--resume-retries; what Debian 12 brings is 23.0."""
RAW_PROGRESS_SINCE = (24, 1)
_DOWNLOADING = re.compile(r"\s*Downloading (\S+?)(?: \(([^)]*)\))?$")
_RAW = re.compile(r"Progress (\d+) of (\d+)$")
_OTHER_PYTHON = re.compile(r"versions that require a different python version: (.*)|requires a different Python: \S+ not in '(.*)'")
_NEWEST_GLIBC = 60
_TOLD = ("Installing collected", "Building wheel", "Attempting to resume", "Resuming download")
_LARGE = re.compile(r"torch|nvidia-|cuda|triton|vllm|sgl|flashinfer|xgrammar|llm-|llama|skulk|transformers|numpy|scipy|pandas|opencv|ray")
_TOGETHER = 16
_WHEEL_GLIBC = re.compile(r"manylinux_2_(\d+)_")


@dataclass(frozen=True, slots=True)
class Package:
    """One that is to be installed. sha256 is empty where pip does not tell it, as of a folder."""

    name: str
    version: str
    sha256: str = ""
    url: str = ""

    @property
    def is_remote(self) -> bool:
        """Else it lies on this machine: in a wheelhouse, or where our own engine's wheel is."""
        return self.url.startswith(("http://", "https://"))

    @property
    def file(self) -> str:
        """Name of its file."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def lies_in(self, folder: Path) -> bool:
        """Whether it has arrived there whole; of a source, whether its wheel has been built."""
        if not self.file.endswith(".whl"):
            return any(folder.glob(f"{self.name.replace('-', '[-_.]')}-{self.version}-*.whl"))
        whole = folder / self.file
        if not whole.is_file():
            return False
        with whole.open("rb") as stream:
            return not self.sha256 or hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256

    @property
    def pin(self) -> str:
        """Its line in a lock file."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def pip_environment(wheelhouse: Path | None) -> dict[str, str]:
    """For pip of another interpreter than ours. With a wheelhouse, that alone counts, whatever pip is told elsewhere."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if wheelhouse is None:
        return environment
    environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
    return environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheelhouse)}


class Pip:
    """Of one environment."""

    def __init__(self, python: str, environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
        self._python = python
        self._environment = {**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        self.tell = tell
        self._version = version_of(self._ask("--version").split()[1], (0,))

    def renew(self) -> None:
        """A pip that goes on with half a file, where there is one to be had; else the work goes on with this one."""
        if self._version < RESUMES_SINCE:
            self._run(["install", "--quiet", "--upgrade", "pip"], lambda _: None)
            self._version = version_of(self._ask("--version").split()[1], (0,))

    def resolve(self, wanted: Sequence[str], report: Path) -> tuple[Package, ...]:
        """What `wanted` comes to on this machine; nothing is installed. Raises ApplianceError."""
        code, said = self._run(["install", "--dry-run", "--ignore-installed", "--report", str(report), *wanted], self.tell)
        if code:
            raise self._refusal("find what it needs", wanted, said)
        return packages_in(json.loads(report.read_text(encoding="utf-8")))

    def fetch(self, packages: Sequence[Package], folder: Path) -> None:
        """Each as a wheel in the folder, where the next try finds what this one has brought. Raises ApplianceError."""
        for batch in batches([package for package in packages if package.is_remote and not package.lies_in(folder)]):
            of_sources = not batch[0].file.endswith(".whl")
            words = ["wheel", "--no-deps", "-w"] if of_sources else ["download", "--no-deps", "-d"]
            urls = [f"{package.url}#sha256={package.sha256}" if package.sha256 else package.url for package in batch]
            code, said = self._run([*words, str(folder), *urls], self.tell)
            if code:
                raise self._refusal(f"fetch {', '.join(package.name for package in batch)}", [], said)

    def install(self, wanted: Sequence[str]) -> None:
        """Raises ApplianceError."""
        code, said = self._run(["install", "--no-warn-script-location", *wanted], self.tell)
        if code:
            raise self._refusal("install the engine", wanted, said)

    def _ask(self, *words: str) -> str:
        command = [self._python, "-m", "pip", *words]
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False, preexec_fn=ends_with_us())
        if ended.returncode:
            raise ApplianceError(f"cannot run pip of {self._python}: {ended.stderr.strip()[-300:]}", hint="apt install python3-venv")
        return ended.stdout

    def _run(self, words: Sequence[str], show: Callable[[str], None]) -> tuple[int, list[str]]:
        style = ["--progress-bar", "raw" if self._version >= RAW_PROGRESS_SINCE else "off"]
        resume = ["--resume-retries", "10"] if self._version >= RESUMES_SINCE else []
        command = [self._python, "-m", "pip", words[0], "--no-cache-dir", *style, *resume, *words[1:]]
        said: deque[str] = deque(maxlen=200)
        with subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=ends_with_us()
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                said.append(line.rstrip())
                show(line.rstrip())
        return child.returncode, list(said)

    def _refusal(self, what: str, wanted: Sequence[str], said: Sequence[str]) -> ApplianceError:
        """Its own last words, and what of this machine they mean."""
        first = next((index for index, line in enumerate(said) if line.startswith("ERROR")), -1)
        hint = "this needs a package index (pip's settings and PIP_* variables count), or a folder of wheels: --wheelhouse"
        return ApplianceError(f"cannot {what}: {' '.join(' '.join(said[first:]).split())[:900]}", hint=self._misfit(wanted, said) or hint)

    def _misfit(self, wanted: Sequence[str], said: Sequence[str]) -> str:
        """Of the C library or Python, where nothing was found for this machine's."""
        other = next((found[1] or found[2] for line in said if (found := _OTHER_PYTHON.search(line))), "")
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        if other:
            return f"there are versions for other Pythons than {ours} ({other[:200]}): name one with --python"
        if not any("No matching distribution" in line for line in said):
            return ""
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
        for word in wanted:
            newer = self._wheel_for_newer_glibc(word) if not word.startswith("-") else ""
            if newer:
                return f"{newer}, this machine has glibc {glibc}: take an older version of it, or a newer distribution"
        return ""

    def _wheel_for_newer_glibc(self, requirement: str) -> str:
        platforms = [f"--platform=manylinux_2_{minor}_{os.uname().machine}" for minor in range(5, _NEWEST_GLIBC)]
        words = [
            "install",
            "--dry-run",
            "--no-deps",
            "--only-binary=:all:",
            "--target",
            "/nonexistent",
            *platforms,
            "--report",
            "-",
            "--quiet",
        ]
        code, said = self._run([*words, requirement], lambda _: None)
        wheel = _WHEEL_GLIBC.search("".join(said)) if not code else None
        return f"{requirement} is built for glibc 2.{wheel[1]}" if wheel is not None else ""


def batches(packages: Sequence[Package]) -> Iterator[Sequence[Package]]:
    """pip keeps what it has fetched when all that it was told of has come: so large ones, and sources, come alone."""
    small = [package for package in packages if package.file.endswith(".whl") and not _LARGE.match(package.name)]
    yield from ([package] for package in packages if package not in small)
    yield from (small[first : first + _TOGETHER] for first in range(0, len(small), _TOGETHER))


def packages_in(report: Mapping[str, Any]) -> tuple[Package, ...]:
    """Of pip's installation report (version 1), in the order of their names."""
    found = []
    for entry in report["install"]:
        facts = entry["metadata"]
        name = str(facts["name"]).lower().replace("_", "-").replace(".", "-")
        url = str(entry["download_info"].get("url", ""))
        found.append(Package(name, str(facts["version"]), _sha256(entry["download_info"].get("archive_info", {}), url), url))
    return tuple(sorted(found, key=lambda package: package.name))


def _sha256(archive: Mapping[str, Any], url: str) -> str:
    """As pip tells it: since 23.1 under `hashes`, before that in one word, and of a file on this machine not at all."""
    algorithm, _, digest = str(archive.get("hash", "")).partition("=")
    told = str(archive.get("hashes", {}).get("sha256", "")) or (digest if algorithm == "sha256" else "")
    lies_here = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if told or lies_here is None or not lies_here.is_file():
        return told
    with lies_here.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Progress:
    """pip's lines as one line for a person: how many of how many files, which one, how much of it. A line a file where nobody watches."""

    def __init__(self, total: int, stream: Any = None) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._watched = self._stream.isatty()
        self._files = 0
        self._file = ""

    def __call__(self, line: str) -> None:
        """One line of pip's."""
        if (new := _DOWNLOADING.match(line)) is not None:
            if new[1].endswith(".metadata"):
                return
            self._files += 1
            self._file = new[1]
            if not self._watched:
                self._say(f"{self._count} {self._file}{f' ({new[2]})' if new[2] else ''}")
        elif (part := _RAW.match(line)) is not None:
            done, whole = int(part[1]), int(part[2])
            if self._watched and whole:
                self._say(f"{self._count} {self._file}  {100 * done // whole} % of {format_bytes(whole)}")
        elif line.startswith(_TOLD) or (self._watched and line.startswith("Collecting ")):
            self._say(line.strip()[:100])

    def close(self) -> None:
        """The line is done."""
        if self._watched:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    @property
    def _count(self) -> str:
        return f"{self._files}/{self._total}" if self._total else f"{self._files}"

    def _say(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._watched else f"{text}\n")
        self._stream.flush()
