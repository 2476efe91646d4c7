"""`python -m appliance.engine.convert GGUF OUT_DIR`: a GGUF file becomes a model folder that the engine memory-maps.

Written into a sibling folder and renamed when whole, so that OUT_DIR never holds half a model: an interrupted conversion
leaves `.NAME.partial`, which the next one removes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from appliance.core.errors import ApplianceError, ModelError
from appliance.core.units import format_bytes
from appliance.engine.folder_lock import only_one
from appliance.engine.gguf_file import GgufFile
from appliance.engine.gguf_model import ModelPlan, TensorJob, plan_model
from appliance.engine.gguf_tokenizer import build_tokenizer, end_token_ids, tokenizer_config
from appliance.engine.manifest import MANIFEST, Manifest, check_manifest, read_manifest, sync_folder, write_durably, write_manifest
from appliance.engine.progress import Progress

_PIECE_BYTES = 32 * 1024**2
"""Float32 bytes decoded and written at once: bounds the memory of a conversion."""
_ALIGNMENT_BYTES = 64
"""Of the tensor data in the file: a cache line, and the widest vector register."""
_TOKENIZER_BYTES = 64 * 1024**2
"""Allowance for tokenizer.json and the other small files."""


def convert(source: Path, out_dir: Path, stream: TextIO) -> Manifest:
    """Convert, unless `out_dir` already holds just that.

    Raises:
        ModelError: the source cannot be converted, or `out_dir` holds something else.
        ApplianceError: not enough disk space, or another conversion of it is running.
    """
    out_dir = out_dir.resolve()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with only_one(out_dir.parent / f".{out_dir.name}.lock", f"the conversion into {out_dir}"):
        digest = _sha256(source, stream)
        existing = finished(out_dir)
        if existing is not None and existing.source_sha256 == digest:
            stream.write(f"{out_dir} is already converted from {existing.source_name}.\n")
            return existing
        _check_replaceable(out_dir)
        file = GgufFile(source)
        plan = plan_model(file)
        _check_space(out_dir, plan)
        partial = out_dir.parent / f".{out_dir.name}.partial"
        if partial.exists():
            stream.write(f"Removing {partial}, which an interrupted conversion left.\n")
            shutil.rmtree(partial)
        partial.mkdir()
        _write_folder(file, plan, partial, stream)
        manifest = Manifest.of(source, digest, partial)
        write_manifest(partial, manifest)
        sync_folder(partial)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        partial.rename(out_dir)
        sync_folder(out_dir.parent)
        return manifest


def finished(out_dir: Path) -> Manifest | None:
    """The manifest of a whole folder; None when there is none, or its files are not those that the manifest says, byte for byte."""
    try:
        check_manifest(out_dir, content=True)
        return read_manifest(out_dir)
    except ModelError:
        return None


def _check_replaceable(out_dir: Path) -> None:
    """Never delete what is not ours: only an empty folder or one with our manifest is replaced."""
    if out_dir.is_dir() and (not any(out_dir.iterdir()) or (out_dir / MANIFEST).exists()):
        return
    if out_dir.exists():
        raise ModelError(f"{out_dir} exists and was not made by this converter", hint="choose another name, or remove it")


def _check_space(out_dir: Path, plan: ModelPlan) -> None:
    needed = sum(job.size_bytes for job in plan.jobs) + _TOKENIZER_BYTES
    free = shutil.disk_usage(out_dir.parent).free
    if free < needed:
        raise ApplianceError(
            f"not enough disk space in {out_dir.parent}: the converted model needs {format_bytes(needed)}, {format_bytes(free)} are free",
            hint="free some space, or choose another folder",
        )


def _sha256(path: Path, stream: TextIO) -> str:
    try:
        total = path.stat().st_size
        progress = Progress(f"Checking {path.name}", total, stream)
        digest = hashlib.sha256()
        with path.open("rb") as handle:
            while piece := handle.read(_PIECE_BYTES):
                digest.update(piece)
                progress.add(len(piece))
        progress.finish()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint="give the path of a .gguf file") from error
    return digest.hexdigest()


def _write_folder(file: GgufFile, plan: ModelPlan, folder: Path, stream: TextIO) -> None:
    context = plan.config["max_position_embeddings"]
    tokenizer = build_tokenizer(file.fields)
    ends = end_token_ids(file.fields)
    generation = {key: plan.config[key] for key in ("bos_token_id", "pad_token_id") if plan.config[key] is not None}
    for name, value in (
        ("config.json", {key: v for key, v in plan.config.items() if v is not None}),
        ("tokenizer_config.json", tokenizer_config(file.fields, context)),
        ("generation_config.json", generation | {"eos_token_id": ends}),
    ):
        write_durably(folder / name, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
    write_durably(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    _write_safetensors(folder / "model.safetensors", plan.jobs, stream)


def _write_safetensors(path: Path, jobs: tuple[TensorJob, ...], stream: TextIO) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for job in jobs:
        begin, end = end, end + job.size_bytes
        header[job.name] = {"dtype": "F32", "shape": list(job.source.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    progress = Progress("Converting", end, stream)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for job in jobs:
            for piece in _pieces(job):
                handle.write(piece)
                progress.add(len(piece))
        handle.flush()
        os.fsync(handle.fileno())
    progress.finish()


def _pieces(job: TensorJob) -> Iterator[bytes]:
    """The tensor's float32 bytes, some rows at a time."""
    total_rows = job.source.data.shape[0]
    row_bytes = max(1, job.size_bytes // total_rows)
    step = max(1, _PIECE_BYTES // (row_bytes * job.unit_rows)) * job.unit_rows
    for begin in range(0, total_rows, step):
        rows = job.source.rows(begin, min(begin + step, total_rows))
        yield (rows if job.transform is None else job.transform(rows)).tobytes()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m appliance.engine.convert",
        description="Convert a GGUF file into a model folder for the built-in engine.",
        epilog="example: python -m appliance.engine.convert SmolLM2.gguf /var/lib/llm-appliance/models --name smollm2",
    )
    parser.add_argument("gguf", type=Path, help="the file to convert")
    parser.add_argument("out_dir", type=Path, help="the model folder to make; with --name, the folder that holds it")
    parser.add_argument("--name", default="", help="make OUT_DIR/NAME")
    arguments = parser.parse_args()
    try:
        convert(arguments.gguf, arguments.out_dir / arguments.name, sys.stderr)
    except ApplianceError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or arguments.out_dir}: {error.strerror}; mend that, or name another folder, and run it again")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run it again to start over")
    sys.stdout.write(f"{arguments.out_dir / arguments.name}\n")


if __name__ == "__main__":
    main()
