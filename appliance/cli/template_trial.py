"""Whether a model's chat template renders a plain question, tried by the built-in engine's own renderer where that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from appliance.cli.pip_runs import pip_environment
from appliance.config.runtimes import current_runtime, engine_is_here
from appliance.orphans import ends_with_us

_PATIENCE_S = 30.0
_TRIAL = """
import json, pathlib, sys
from appliance.engine.template import load_chat_template
folder = pathlib.Path(sys.argv[1])
config = folder / "tokenizer_config.json"
template = load_chat_template(folder, json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {})
if template is not None:
    template.render([{"role": "user", "content": "Hi"}], {})
"""


def trouble_with_template(folder: Path, state_dir: Path) -> str:
    """What it says instead; empty where it renders, where the model has none, and where nobody here can try it."""
    runtime = current_runtime(state_dir)
    if not folder.is_dir() or (runtime is None and not engine_is_here()):
        return ""
    python = str(runtime / "bin" / "python") if runtime is not None else sys.executable
    try:
        ended = subprocess.run(
            [python, "-c", _TRIAL, str(folder)],
            env=pip_environment(None), cwd="/", capture_output=True, text=True, timeout=_PATIENCE_S, check=False, preexec_fn=ends_with_us(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it was not done within {_PATIENCE_S:g} s"
    return "" if ended.returncode == 0 else " ".join(ended.stderr.strip().rpartition("\n")[2].split())[:300]
