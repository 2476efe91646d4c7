"""The annotated etc/appliance.toml is the schema, in full."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config import Config, load_config
from appliance.config.annotate import annotated, installed, toml_value
from appliance.config.keys import KeyFacts, facts_of, keys_of
from appliance.config.schema import tables

COMMITTED = Path(__file__).parents[3] / "etc" / "appliance.toml"


def test_the_committed_file_is_current() -> None:
    """A key added to schema.py and not to etc/ fails here, with the command that mends it."""
    assert COMMITTED.read_text(encoding="utf-8") == annotated(), "run: python -m appliance.config.annotate > etc/appliance.toml"


def test_as_shipped_it_changes_nothing() -> None:
    """All keys are commented out, all tables are there."""
    document = tomllib.loads(COMMITTED.read_text(encoding="utf-8"))
    assert document == {table: {} for table in tables()}
    assert load_config(COMMITTED).config == Config()


def test_uncommented_it_is_every_key_at_its_default(tmp_path: Path) -> None:
    """Nothing missing, nothing extra, and each default written in a form that reads back to itself."""
    uncommented = re.sub(r"(?m)^#(?=[a-z0-9_]+ = )", "", COMMITTED.read_text(encoding="utf-8"))
    path = tmp_path / "appliance.toml"
    path.write_text(uncommented, encoding="utf-8")
    loaded = load_config(path)
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {str(path)}


def test_every_key_has_its_meaning_above_it() -> None:
    """The words of the schema, and its choices."""
    text = " ".join(COMMITTED.read_text(encoding="utf-8").replace("\n#", " ").split())
    for kind in tables().values():
        for name, key_field in keys_of(kind).items():
            facts = facts_of(key_field)
            assert facts.doc.endswith("."), f"{name}: a sentence ends with a full stop"
            assert installed(facts.doc) in text
            assert all(f'"{choice}"' in text for choice in facts.choices)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", '"0B"'),
        (1000, "bytes", '"1000B"'),
        (1536 * 1024**2, "bytes", '"1536MiB"'),
        (0.0, "s", '"0s"'),
        (0.05, "s", '"0.05s"'),
        (90.0, "s", '"90s"'),
        (86400.0, "s", '"1d"'),
        (0.9, "", "0.9"),
        (True, "", "true"),
        ('a"b\n', "", '"a\\"b\\n"'),
        (("-v", "x"), "", '["-v", "x"]'),
    ],
)
def test_values_are_written_as_people_write_them(value: object, unit: str, text: str) -> None:
    """The largest unit that needs no fraction."""
    assert toml_value(value, KeyFacts("", unit)) == text


@given(
    st.integers(min_value=1024**2, max_value=2**62),
    st.floats(min_value=0, max_value=3600),
    st.floats(min_value=0.1, max_value=0.99),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
)
def test_what_is_written_reads_back(pool_bytes: int, wait_s: float, fraction: float, name: str, args: list[str]) -> None:
    """`config show` can be pasted into a file, for any legal value."""
    values = {"engine.kv_pool_bytes": pool_bytes, "gpu.wait_s": wait_s, "budget.mem_fraction": fraction, "model.name": name}
    values["engine.extra_args"] = tuple(args)
    written = {}
    for key, value in values.items():
        table, _, key_name = key.partition(".")
        facts = facts_of(keys_of(tables()[table])[key_name])
        written[key] = tomllib.loads(f"value = {toml_value(value, facts)}")["value"]
    config = load_config(None, written).config
    assert config.engine.kv_pool_bytes == pool_bytes
    assert (config.gpu.wait_s, config.budget.mem_fraction) == (wait_s, fraction)
    assert (config.model.name, config.engine.extra_args) == (name, tuple(args))
