"""The file of API keys: what it takes, and what it says of what it does not take."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.api_keys import ApiKey, entry_text, hash_of, new_key, read_api_keys
from appliance.core.errors import ConfigError

HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def written(tmp_path: Path, text: str) -> Path:
    """A file of keys."""
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_entry_is_read_with_its_limits(tmp_path: Path) -> None:
    """Every field, and the defaults of an entry that has none."""
    path = written(
        tmp_path,
        f'[alice]\nsha256 = "{HASH}"\npriority = "low"\nmax_concurrent = 2\nmax_queued = 9\nrequests_per_minute = 60\n'
        f'tokens_per_minute = 1000\n\n["ci.1"]\nsha256 = "{"0" * 64}"\nmonitor_only = true\n',
    )
    alice, robot = read_api_keys(path)
    assert alice == ApiKey("alice", HASH, "low", False, 2, 9, 60, 1000)
    assert robot == ApiKey("ci.1", "0" * 64, monitor_only=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key; make an entry with"),
        ("[alice", "is not TOML"),
        ("alice = 3", "alice must be a table"),
        ("[alice]\n", "needs sha256 = 64 hexadecimal digits"),
        ('[alice]\nsha256 = "' + HASH.upper() + '"', "in lower case"),
        (f'[alice]\nsha256 = "{HASH}"\nprioritty = "low"', "did you mean priority"),
        (f'[alice]\nsha256 = "{HASH}"\npriority = "urgent"', "is none of 'high', 'normal', 'low'"),
        (f'[alice]\nsha256 = "{HASH}"\nmax_queued = -1', "max_queued = -1: is below the minimum of 0"),
        (f'[alice]\nsha256 = "{HASH}"\nmax_queued = true', "expected a whole number"),
        (f'[alice]\nsha256 = "{HASH}"\n[bob]\nsha256 = "{HASH}"', "alice and bob are the same key"),
        (f'[a.b]\nsha256 = "{HASH}"', "a name with dots in quotes"),
        (f'["-x"]\nsha256 = "{HASH}"', "is no name of a key"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    """With the file, the entry and the cure."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        read_api_keys(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


def test_every_error_is_said_at_once(tmp_path: Path) -> None:
    """A line each."""
    path = written(tmp_path, f'[alice]\nsha256 = "{HASH}"\nmax_queued = -1\n[bob]\nsha256 = 3\n')
    with pytest.raises(ConfigError) as refused:
        read_api_keys(path)
    assert "[alice] max_queued" in str(refused.value)
    assert "[bob] needs sha256" in str(refused.value)


def test_a_key_that_stands_where_its_hash_belongs_is_not_repeated(tmp_path: Path) -> None:
    """The message goes to the journal."""
    secret = new_key()
    path = written(tmp_path, f'[alice]\nsha256 = "{secret}"\n[bob]\nsha256 = ["{secret}"]\n')
    with pytest.raises(ConfigError) as refused:
        read_api_keys(path)
    assert secret not in str(refused.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    """With the key of the configuration that names it."""
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file.*gateway\.api_keys_file"):
        read_api_keys(tmp_path / "nothing.toml")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_every_entry_that_is_made_reads_back(name: str) -> None:
    """Names with dots and dashes too."""
    secret = new_key()
    document = tomllib.loads(entry_text(name, secret))
    assert document == {name: {"sha256": hash_of(secret.encode())}}


def test_a_name_that_cannot_be_one_is_refused() -> None:
    """Before anything is written."""
    with pytest.raises(ConfigError, match="is no name of a key"):
        entry_text("alice smith", new_key())


def test_keys_are_long_and_never_the_same() -> None:
    """256 bits, in characters that every header takes."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sk-lla-") and len(key) == 50 and key.isascii() for key in keys)
