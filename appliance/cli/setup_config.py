"""The drop-in that `appliancectl setup` writes: never over one that somebody has edited since."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from appliance.config.annotate import toml_value
from appliance.config.keys import facts_of, keys_of
from appliance.config.schema import tables
from appliance.core.errors import ApplianceError

NAME = "50-setup.toml"
_SEAL = "# written by appliancectl setup "
_HEAD = "# It writes this file anew as long as nobody has edited it; what you put into 60-own.toml beside it wins.\n"


def rendered(values: Mapping[str, object]) -> str:
    """The file's text for "table.key" → value; its first line seals the rest."""
    lines = [_HEAD]
    for table, kind in tables().items():
        mine = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == table}
        if mine:
            keys = keys_of(kind)
            lines += [f"[{table}]\n", *(f"{key} = {toml_value(value, facts_of(keys[key]))}\n" for key, value in mine.items())]
    body = "".join(lines)
    return f"{_SEAL}{_digest(body)}\n{body}"


def is_edited(text: str) -> bool:
    """Whether it is not as we wrote it."""
    seal, _, body = text.partition("\n")
    return seal != f"{_SEAL}{_digest(body)}"


def write(folder: Path, values: Mapping[str, object], *, may_replace: bool) -> Path:
    """Write conf.d's drop-in, unless it says the same already.

    Args:
        may_replace: the owner has agreed to lose the edits.

    Raises:
        ApplianceError: it was edited and may not be replaced, or cannot be written.
    """
    file, text = folder / NAME, rendered(values)
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else None
        if before == text:
            return file
        if before is not None and is_edited(before) and not may_replace:
            raise ApplianceError(
                f"{file} was edited since setup wrote it, and is kept as it is",
                hint="move your edits to 60-own.toml beside it and remove it, or answer yes when asked (setup without --yes)",
            )
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(0o644)
        fresh.replace(file)
    except OSError as error:
        raise ApplianceError(f"{file} cannot be written: {error.strerror}", hint="run setup as root, or with --no-config") from None
    return file


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
