"""SIGHUP: which keys count when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.config.keys import keys_of
from appliance.config.schema import Config, GpuTable, LadderTable, ModelTable, SupervisorTable, tables
from appliance.supervisor.reload import When, changes, merged
from appliance.supervisor.settings import fingerprint

EVERY_KEY = [(table, name) for table, kind in tables().items() for name in keys_of(kind)]


def different(value: object) -> object:
    """Of the same type."""
    match value:
        case bool():
            return not value
        case tuple():
            return (*value, "x")
        case str():
            return f"{value}x"
        case int() | float():
            return value + 1
    raise AssertionError(f"a key of type {type(value)}: extend this")


@pytest.mark.parametrize(("table", "name"), EVERY_KEY, ids=[f"{table}.{name}" for table, name in EVERY_KEY])
def test_every_key_has_an_answer(table: str, name: str) -> None:
    """A key that is added to the schema is never reloaded in silence: its table says when it counts."""
    before = Config()
    value = getattr(getattr(before, table), name)
    other = (
        (*value, "x")
        if isinstance(value, tuple)
        else f"{value}x"
        if isinstance(value, str)
        else not value
        if isinstance(value, bool)
        else value + 1
    )
    after = replace(before, **{table: replace(getattr(before, table), **{name: other})})
    (change,) = changes(before, after)
    assert (change.key, change.before, change.after) == (f"{table}.{name}", value, other)
    assert change.when in When


def test_what_needs_a_restart_is_kept() -> None:
    """The sensors go on as they were opened; the rest of the new configuration is taken over."""
    old = Config()
    new = replace(
        old,
        gpu=GpuTable(wait_s=5.0),
        model=ModelTable(path="/other"),
        ladder=LadderTable(climb_after_s=9.0),
        supervisor=SupervisorTable(probe_interval_s=3.0),
    )
    kept = merged(old, new)
    assert kept.gpu == old.gpu
    assert (kept.model, kept.ladder, kept.supervisor) == (new.model, new.ladder, new.supervisor)
    assert {change.key: change.when for change in changes(old, new)} == {
        "model.path": When.NEXT_ENGINE,
        "gpu.wait_s": When.RESTART,
        "supervisor.probe_interval_s": When.NEXT_ENGINE,
        "ladder.climb_after_s": When.NOW,
    }


def test_nothing_changed() -> None:
    """An equal configuration is no change."""
    assert changes(Config(), Config()) == ()


def test_another_word_about_p2p_begins_a_new_history() -> None:
    """Its rungs hold what was switched off between the cards then."""
    plain = Config()
    assert len({fingerprint(replace(plain, gpu=replace(plain.gpu, p2p=word))) for word in ("auto", "on", "off")}) == 3
    assert fingerprint(replace(plain, gpu=GpuTable(wait_s=1.0))) == fingerprint(plain)
