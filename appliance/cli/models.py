"""Which model folder `run` serves. It looks at names only: whether the folder can be served is the engine's to say."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.cli.checks.machine import barrier_of
from appliance.core.errors import ModelError

DEMO_MODEL = "SmolLM2-135M-Instruct"
"""The folder that `appliancectl setup --demo` makes; a test holds it to the engine's own constant."""
MODELS = "models"
"""Folder of models inside the state folder."""
_SETUP = "`appliancectl setup --demo` brings a small one"


def model_folder(named: str, models_dir: Path) -> Path:
    """The folder that was named (by --model or model.path), else the demo model of this state folder.

    Raises:
        ModelError: there is none; the hint says how to get one.
    """
    if not named:
        demo = models_dir / DEMO_MODEL
        _may_look(demo)
        if not (demo / "config.json").is_file():
            raise ModelError(f"no model: neither --model nor model.path is set, and {demo} is not there", hint=f"{_SETUP}")
        return demo.resolve()
    folder = Path(named)
    _may_look(folder)
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist", hint=f"name another with --model; {_SETUP}")
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder", hint="a model is a folder with config.json, *.safetensors and tokenizer.json")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model folder {folder} holds no config.json",
            hint=f"a model is a folder with config.json, *.safetensors and tokenizer.json; {_SETUP}",
        )
    return folder.resolve()


def gguf(named: str) -> Path:
    """The file, or the folder with files, that llama.cpp is to serve; which one of a folder's is its backend's to say.

    Raises:
        ModelError: nothing is named, or it is not there.
    """
    if not named:
        raise ModelError("no model: neither --model nor model.path is set", hint="name a GGUF file")
    _may_look(Path(named))
    if not Path(named).exists():
        raise ModelError(f"the model {named} does not exist", hint="name a GGUF file that is there")
    return Path(named).resolve()


def _may_look(path: Path) -> None:
    """Raises ModelError where this user cannot: that is another trouble than a model that is missing."""
    if (barrier := barrier_of(path)) is not None:
        raise ModelError(f"the model {path} cannot be read: this user may not look into {barrier}", hint="run this as a user who may")


def has_chat_template(folder: Path) -> bool:
    """Whether clients can talk to it in turns; a base model only continues text."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
