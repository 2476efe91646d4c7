"""Which model folder `run` serves."""

import json
from pathlib import Path

import pytest

from appliance.cli.models import DEMO_MODEL, has_chat_template, model_folder
from appliance.core.errors import ModelError


def test_a_named_folder_is_taken(tmp_path: Path) -> None:
    """Resolved, so that it means the same in the children."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    assert model_folder(str(tmp_path / "m/../m"), tmp_path / "models") == tmp_path / "m"


def test_the_demo_model_is_taken_where_none_is_named(tmp_path: Path) -> None:
    """After `appliancectl setup --demo`."""
    demo = tmp_path / "models" / DEMO_MODEL
    demo.mkdir(parents=True)
    with pytest.raises(ModelError, match="setup --demo"):
        model_folder("", tmp_path / "models")
    (demo / "config.json").write_text("{}")
    assert model_folder("", tmp_path / "models") == demo


def test_what_is_no_model_folder_is_refused_with_the_cure(tmp_path: Path) -> None:
    """Missing, a file, or without config.json."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for named, words in (("missing", "does not exist"), ("file", "is no folder"), ("empty", "holds no config.json")):
        with pytest.raises(ModelError, match=words) as caught:
            model_folder(str(tmp_path / named), tmp_path)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("files", "has"),
    [
        ({}, False),
        ({"tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"})}, True),
        ({"tokenizer_config.json": json.dumps({"chat_template": None})}, False),
        ({"tokenizer_config.json": "[1]"}, False),
        ({"tokenizer_config.json": "no json"}, False),
        ({"chat_template.jinja": "{{ messages }}"}, True),
    ],
)
def test_a_model_with_a_chat_template_is_told_from_one_without(tmp_path: Path, files: dict[str, str], has: bool) -> None:
    """The line to try must be one that works."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert has_chat_template(tmp_path) is has
