"""Wheels of a few bytes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: str = "", tag: str = "py3-none-any") -> Path:
    """One that pip installs. `requires`: lines for its METADATA."""
    wheel = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    whole = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: engine\n{requires}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in whole.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if ".data/scripts/" in path else 0o100644) << 16
            archive.writestr(entry, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*whole, f"{info}/RECORD"]))
    return wheel
