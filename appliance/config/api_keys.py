"""The file of API keys: who may use the endpoint, and how much of it. Hashes only: whoever reads the file has no key.

    [alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    priority = "high"
    requests_per_minute = 60

One round of SHA-256 is enough because the keys are ours: 256 random bits, which no dictionary holds. A slow hash, as for
passwords, would let any stranger spend our processor.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.config.keys import facts_of, key
from appliance.config.load import convert
from appliance.core.errors import ConfigError

PREFIX = "sk-lla-"
"""So that people, and programs that look for leaked secrets, see what it is."""
PRIORITIES = ("high", "normal", "low")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry. Limits of 0 are none."""

    name: str
    sha256: str = key("", "Hash of the key, 64 hexadecimal digits.")
    priority: str = key("normal", "Class of its requests; one of them may ask for a lower one.", choices=PRIORITIES)
    monitor_only: bool = key(False, "May read /status and /metrics and nothing else.")
    max_concurrent: int = key(0, "Requests that the engine has at once.", minimum=0, maximum=100_000)
    max_queued: int = key(0, "Requests that wait at once.", minimum=0, maximum=100_000)
    requests_per_minute: int = key(0, "Requests accepted a minute.", minimum=0, maximum=10_000_000)
    tokens_per_minute: int = key(0, "Prompt and answer tokens a minute.", minimum=0, maximum=10_000_000_000)
    admin: bool = key(False, "May press the page's buttons, where gateway.admin_actions is on, and download the bundle of an incident.")


_FIELDS = {field.name: field for field in dataclasses.fields(ApiKey) if field.name != "name"}


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The entries of a file.

    Raises:
        ConfigError: it cannot be read, is wrong, or holds no entry; every error is in the message, a line each.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", hint="gateway.api_keys_file names the file of API keys") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{path}: is not TOML: {error}", hint="an entry is made by: appliancectl key NAME") from None
    errors: list[str] = []
    found = [_entry(path, name, content, errors) for name, content in document.items()]
    keys = tuple(entry for entry in found if entry is not None)
    errors.extend(_shared_hashes(path, keys))
    if not document:
        errors.append(f"{path}: holds no key; make an entry with: appliancectl key NAME >> {path}")
    if errors:
        raise ConfigError("\n".join(errors))
    return keys


def read_fallback_key(file: str) -> bytes:
    """The key for the other endpoint (fallback.api_key_file); empty where no file is named.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if not file:
        return b""
    try:
        secret = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"fallback.api_key_file = {file!r}: cannot be read ({reason})", hint="one line with the key") from None
    if not secret or not secret.isprintable() or " " in secret:
        raise ConfigError(f"fallback.api_key_file = {file!r}: holds no key", hint="one line with the key")
    return secret.encode()


def new_key() -> str:
    """A fresh key: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(secret: bytes) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(secret).hexdigest()


def entry_text(name: str, secret: str) -> str:
    """The lines to append to the file.

    Raises:
        ConfigError: the name cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a key: 1 to 64 letters, digits and ._-", hint="use something like alice or ci-1")
    table = f'"{name}"' if "." in name else name
    return f'[{table}]\nsha256 = "{hash_of(secret.encode())}"\n'


def _entry(path: Path, name: str, content: Any, errors: list[str]) -> ApiKey | None:
    if not _NAME.fullmatch(name):
        errors.append(f"{path}: [{name}] is no name of a key: 1 to 64 letters, digits and ._-")
        return None
    if not isinstance(content, dict) or any(isinstance(value, dict) for value in content.values()):
        errors.append(f"{path}: {name} must be a table of settings; write [{name}], a name with dots in quotes, and sha256 below it")
        return None
    values: dict[str, Any] = {}
    before = len(errors)
    for field_name, value in content.items():
        field = _FIELDS.get(field_name)
        if field is None:
            near = difflib.get_close_matches(field_name, _FIELDS, n=1)
            errors.append(f"{path}: [{name}] has an unknown key {field_name}{f'; did you mean {near[0]}?' if near else ''}")
            continue
        try:
            values[field_name] = convert(value, field, facts_of(field))
        except ValueError as error:
            errors.append(f"{path}: [{name}] {field_name} {_shown(field_name, value)}: {error}")
    if not _SHA256.fullmatch(str(values.get("sha256", ""))):
        errors.append(f"{path}: [{name}] needs sha256 = 64 hexadecimal digits in lower case, the hash of the key and never the key itself")
    return None if len(errors) > before else ApiKey(name, **values)


def _shown(field_name: str, value: Any) -> str:
    """Somebody may have written the key itself where its hash belongs: it is not repeated into logs."""
    return "(not shown)" if field_name == "sha256" else f"= {value!r}"


def _shared_hashes(path: Path, keys: tuple[ApiKey, ...]) -> list[str]:
    names: dict[str, list[str]] = {}
    for entry in keys:
        names.setdefault(entry.sha256, []).append(entry.name)
    return [f"{path}: {' and '.join(shared)} are the same key; give each a key of its own" for shared in names.values() if len(shared) > 1]
