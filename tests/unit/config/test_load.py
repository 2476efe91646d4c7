"""appliance.toml, its drop-ins and --set: what wins, and that every refusal names file, key, value and cure."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config import Config, load_config
from appliance.config.load import BUILT_IN
from appliance.core.errors import ConfigError


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _refusal(path: Path | None, overrides: dict | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """Nothing needs to be configured, and the origin of every value says so."""
    loaded = load_config(_write(tmp_path / "appliance.toml", ""))
    assert loaded.config == Config() == load_config(None).config
    assert set(loaded.origins.values()) == {BUILT_IN}


def test_drop_ins_win_in_name_order_key_by_key_and_the_command_line_over_all(tmp_path: Path) -> None:
    """Each value remembers the file it came from."""
    main = _write(tmp_path / "appliance.toml", "[gateway]\nport = 1\nhost = '::1'\n[engine]\nmax_running = 2\n")
    _write(tmp_path / "conf.d/20-b.toml", "[gateway]\nport = 3\n")
    _write(tmp_path / "conf.d/10-a.toml", "[gateway]\nport = 2\n[engine]\nmax_running = 4\n")
    _write(tmp_path / "conf.d/ignored.toml~", "not even TOML")
    loaded = load_config(main, {"engine.block_tokens": 32})
    assert (loaded.config.gateway.port, loaded.config.gateway.host) == (3, "::1")
    assert (loaded.config.engine.max_running, loaded.config.engine.block_tokens) == (4, 32)
    assert loaded.origins["gateway.port"].endswith("20-b.toml")
    assert loaded.origins["gateway.host"] == str(main)
    assert loaded.origins["engine.max_running"].endswith("10-a.toml")
    assert loaded.origins["engine.block_tokens"] == "command line"


def test_units_may_be_written(tmp_path: Path) -> None:
    """Strings with units and bare numbers are the same; whole numbers do where fractions are meant."""
    text = "[engine]\nkv_pool_bytes = '1GiB'\n[gateway]\ndrain_s = '2min'\nmax_body_bytes = 4096\n[gpu]\nwait_s = 5\n"
    config = load_config(_write(tmp_path / "a.toml", text)).config
    assert config.engine.kv_pool_bytes == 1024**3
    assert (config.gateway.drain_s, config.gateway.max_body_bytes) == (120.0, 4096)
    assert config.gpu.wait_s == 5.0
    assert isinstance(config.gpu.wait_s, float)


def test_lists_become_tuples(tmp_path: Path) -> None:
    """The configuration is immutable all the way down."""
    config = load_config(_write(tmp_path / "a.toml", "[engine]\nextra_args = ['--a', 'b c']\n")).config
    assert config.engine.extra_args == ("--a", "b c")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.engine.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[gatway]\nport = 1", "unknown table [gatway]; did you mean gateway?"),
        ("[zzz]\n", "unknown table [zzz]"),
        ("[supervisor]\nwarm_spare = true", "unknown key supervisor.warm_spare; did you mean engine.warm_spare?"),
        ("[gateway]\nprot = 1", "unknown key gateway.prot; did you mean gateway.port?"),
        ("gateway = 3", "gateway is a table: write [gateway]"),
        ("[gateway]\nport = '80'", "gateway.port = '80': expected a whole number, found a string"),
        ("[gateway]\nport = 80.5", "gateway.port = 80.5: expected a whole number, found a number"),
        ("[gateway]\nport = true", "gateway.port = True: expected a whole number, found true or false"),
        ("[gateway]\nport = 70000", "gateway.port = 70000: is above the maximum of 65535"),
        ("[gateway]\nport = -1", "gateway.port = -1: is below the minimum of 0"),
        ("[gateway]\ndrain_s = 'soon'", "gateway.drain_s = 'soon': 'soon' is no duration"),
        ("[gateway]\ndrain_s = false", 'expected a duration such as 30 or "30s"'),
        ("[gateway]\ndrain_s = inf", "expected a finite number"),
        ("[budget]\nmem_fraction = nan", "expected a finite number"),
        ("[engine]\nkv_pool_bytes = 'big'", "'big' is no size"),
        ("[engine]\nkv_pool_bytes = 1.5", 'expected a size such as 536870912 or "512MiB"'),
        ("[engine]\nkv_pool_bytes = '1KiB'", "is below the minimum of 1.00 MiB"),
        ("[engine]\nextra_args = 'a b'", "expected a list of strings, found a string"),
        ("[engine]\nextra_args = [1]", "expected a list of strings"),
        ("[gpu]\nmode = 'requierd'", "is none of 'auto', 'required', 'off'; did you mean 'required'?"),
        ("[gpu]\nmode = 1979-05-27", "gpu.mode"),
        ("[metrics]\nenabled = 1", "expected true or false, found a whole number"),
        ("[supervisor]\nhang_floor_s = 90", "supervisor.hang_floor_s = 90 is above supervisor.hang_ceiling_s = 60"),
        ("[supervisor]\nbackoff_first_s = 61", "supervisor.backoff_first_s = 61 is above supervisor.backoff_max_s = 60"),
        ("[gateway\n", "is not TOML"),
        ("[gateway]\nport = " + "1" * 5000, "is not TOML"),
        ("x = " + "[" * 3000, "is not TOML"),
        ("[gpu]\nwait_s = 1" + "0" * 400, "gpu.wait_s"),
    ],
)
def test_wrong_input_is_refused_with_file_key_value_and_cure(tmp_path: Path, text: str, expected: str) -> None:
    """One line that a person can act on, whatever was wrong."""
    assert expected in _refusal(_write(tmp_path / "appliance.toml", text))


def test_the_file_is_named_where_one_is_to_blame(tmp_path: Path) -> None:
    """With drop-ins the key alone does not say where to look."""
    main = _write(tmp_path / "appliance.toml", "")
    drop_in = _write(tmp_path / "conf.d/10.toml", "[gateway]\nprot = 1")
    assert _refusal(main).startswith(f"{drop_in}: ")


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    """Nobody should have to run `config check` once per mistake; contradictions are among them."""
    main = _write(tmp_path / "appliance.toml", "[gateway]\nprot = 1\nport = 'x'\n[supervisor]\nhang_floor_s = 90\n")
    _write(tmp_path / "conf.d/10.toml", "[zzz]\n")
    lines = _refusal(main, {"engine.thread": 2}).splitlines()
    assert len(lines) == 5
    assert lines[3] == "command line: unknown key engine.thread; did you mean engine.threads?"


def test_a_bucket_that_is_fused_is_a_contradiction() -> None:
    """No prompt could be moved there."""
    refused = _refusal(None, {"admission.fused_lengths": (127, 255), "admission.length_buckets": (128, 255)})
    assert refused == "admission.length_buckets and admission.fused_lengths both have 255; no prompt can be moved to a fused length"


def test_a_missing_file_and_an_unreadable_one_are_refused(tmp_path: Path) -> None:
    """The cure is in the message; a folder is no file."""
    assert "cannot be read (No such file or directory); give another file with --config" in _refusal(tmp_path / "none.toml")
    assert "cannot be read (Is a directory)" in _refusal(tmp_path)


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path: Path) -> None:
    """Windows editors do that."""
    path = tmp_path / "appliance.toml"
    path.write_bytes(b"[model]\nname = '\xe9t\xe9'\n")
    assert "is not UTF-8 (byte 16)" in _refusal(path)


def test_drop_ins_that_cannot_be_listed_are_not_passed_over(tmp_path: Path) -> None:
    """Settings that silently do not count are worse than an error."""
    main = _write(tmp_path / "appliance.toml", "")
    _write(tmp_path / "conf.d", "a file where the folder should be")
    assert "conf.d: cannot be listed (Not a directory)" in _refusal(main)


_toml_scalars = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(), st.lists(st.one_of(st.integers(), st.text()), max_size=3), st.dates()
)


@given(st.sampled_from(sorted(load_config(None).origins)), _toml_scalars)
def test_any_value_is_taken_or_refused_by_name(name: str, value: object) -> None:
    """No value of any TOML type ends in anything but a Config or a ConfigError that names the key."""
    try:
        config = load_config(None, {name: value}).config
    except ConfigError as error:
        assert name in str(error)
    else:
        table, _, key = name.partition(".")
        assert type(getattr(getattr(config, table), key)) is type(getattr(getattr(Config(), table), key))
