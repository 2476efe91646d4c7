"""manifest.json of a converted folder: written last, so its presence says that the conversion finished.

No torch, no numpy: the converter, the engine and the demo read it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.core.errors import ModelError

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when the converter writes something else from the same source: older folders are then made anew."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole folder consists of.

    Attributes:
        source_name, source_bytes, source_sha256: the GGUF file.
        sizes: file name → bytes.
        digests: file name → SHA-256; empty in folders that were made before there were any.
    """

    source_name: str
    source_bytes: int
    source_sha256: str
    sizes: dict[str, int]
    digests: dict[str, str]

    @classmethod
    def of(cls, source: Path, source_sha256: str, folder: Path) -> Manifest:
        """Of a folder whose files are all written."""
        files = sorted(folder.iterdir())
        sizes = {file.name: file.stat().st_size for file in files}
        return cls(source.name, source.stat().st_size, source_sha256, sizes, {file.name: _sha256(file) for file in files})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Durably, as the last file of the folder."""
    value = {
        "format": FORMAT,
        "source": {"name": manifest.source_name, "bytes": manifest.source_bytes, "sha256": manifest.source_sha256},
        "files": {name: {"bytes": size, "sha256": manifest.digests[name]} for name, size in manifest.sizes.items()},
    }
    write_durably(folder / MANIFEST, json.dumps(value, indent=2).encode() + b"\n")


def read_manifest(folder: Path) -> Manifest | None:
    """None: there is none, or one of another format.

    Raises:
        ModelError: it is there and damaged.
    """
    path = folder / MANIFEST
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            return None
        source = value["source"]
        sizes = {str(name): int(entry["bytes"]) for name, entry in value["files"].items()}
        digests = {str(name): str(entry["sha256"]) for name, entry in value["files"].items() if "sha256" in entry}
        return Manifest(str(source["name"]), int(source["bytes"]), str(source["sha256"]), sizes, digests)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: {error}", hint="convert the model again") from error


def check_manifest(folder: Path, *, content: bool = False) -> None:
    """Nothing to say of a folder without a manifest (one that we did not convert).

    Args:
        content: read the files too, a second a gigabyte; else their sizes count, which an engine's start can afford.

    Raises:
        ModelError: a file of ours is missing, has another size or other bytes: the folder is half-written, rotten or was changed.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    for name, expected_bytes in manifest.sizes.items():
        path = folder / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
        if found != f"{expected_bytes} bytes":
            raise _damaged(folder, f"{path} is {found}, the manifest says {expected_bytes} bytes")
        digest = manifest.digests.get(name)
        if content and digest is not None and _sha256(path) != digest:
            raise _damaged(folder, f"{path} has other bytes than were written")


def _damaged(folder: Path, what: str) -> ModelError:
    hint = f"remove {folder} and convert the model again (the demo: `appliancectl setup --demo`)"
    return ModelError(f"{what}: the folder is damaged", hint=hint)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write and wait for the disk."""
    with path.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
