"""What the built-in engine makes of a model, asked of its own code where that is installed: its template, its kind, its GGUF file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from appliance.cli.pip_runs import pip_environment
from appliance.config.runtimes import current_runtime, engine_is_here
from appliance.core.errors import ApplianceError
from appliance.orphans import ends_with_us

_PATIENCE_S = 30.0
_TEMPLATE = """
import json, pathlib, sys
from appliance.engine.template import load_chat_template
folder = pathlib.Path(sys.argv[1])
config = folder / "tokenizer_config.json"
template = load_chat_template(folder, json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {})
if template is not None:
    template.render([{"role": "user", "content": "Hi"}], {})
"""


_KIND = """
import json, pathlib, sys
from appliance.core.errors import ModelError
from appliance.engine.models.registry import read_config
try:
    read_config(json.loads((pathlib.Path(sys.argv[1]) / "config.json").read_text(encoding="utf-8")))
except ModelError as error:
    sys.exit(str(error))
"""


def trouble_with_template(folder: Path, state_dir: Path) -> str:
    """What it says to a plain question instead of rendering it; empty where it renders it, where the model has none, and where nobody
    here can try it."""
    return _tried(_TEMPLATE, folder, state_dir) if folder.is_dir() else ""


def trouble_with_kind(folder: Path, state_dir: Path) -> str:
    """Why the built-in engine does not serve such a model, and who does; empty where it does, and where nobody here can tell."""
    return _tried(_KIND, folder, state_dir) if (folder / "config.json").is_file() else ""


def converted(file: Path, models: Path, name: str, state_dir: Path) -> bool:
    """Have the built-in engine's converter make a model folder of a GGUF file, and say how far it is; or why it does not, then False.

    Raises:
        ApplianceError: the engine is not installed here.
    """
    python = _python(state_dir)
    if python is None:
        raise ApplianceError(
            "converting takes the built-in engine, which is not installed here",
            hint='run `appliancectl setup`; or leave --convert out, and serve the file with engine.backend = "llamacpp"',
        )
    command = [python, "-m", "appliance.engine.convert", str(file), str(models), "--name", name]
    # Our own PYTHONPATH is for the control plane, where it is packaged; in a checkout the engine may need what is set.
    environment = dict(os.environ) if engine_is_here() else pip_environment(None)
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False, preexec_fn=ends_with_us())
    return ended.returncode == 0


def _python(state_dir: Path) -> str | None:
    """Of the built-in engine."""
    runtime = current_runtime(state_dir)
    if runtime is not None:
        return str(runtime / "bin" / "python")
    return sys.executable if engine_is_here() else None


def _tried(script: str, folder: Path, state_dir: Path) -> str:
    """What it complains of."""
    python = _python(state_dir)
    if python is None:
        return ""
    try:
        ended = subprocess.run(
            [python, "-c", script, str(folder)],
            env=pip_environment(None), cwd="/", capture_output=True, text=True, timeout=_PATIENCE_S, check=False, preexec_fn=ends_with_us(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it was not done within {_PATIENCE_S:g} s"
    return "" if ended.returncode == 0 else " ".join(ended.stderr.strip().rpartition("\n")[2].split())[:400]
