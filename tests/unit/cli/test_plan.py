"""`appliancectl plan` as a person and a program use it."""

import json
import resource
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.unit.planner import shapes
from tests.unit.planner.test_startup_log import LLAMA_NEW, SGLANG_0517, VLLM_NEW

ROOT = Path(__file__).parents[3]
KEYS = [
    "mem_fraction", "kv_tokens", "kv_bytes_per_token", "headroom_bytes", "context_length", "fits", "terms", "table", "choice", "ways_out",
    "flags",
]  # fmt: skip


@pytest.fixture
def article(tmp_path: Path) -> list[str]:
    """The article's box on the command line."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.hybrid_27b()))
    return ["plan", "--model", str(file), "--gpu", "24GiB", "--engine", "sglang", "--engine-version", "0.5.17", "--kv-dtype", "fp8_e4m3",
            "--weights", "17.67GiB", "--linear-state", "0.73GiB"]  # fmt: skip


def test_json_has_the_documented_keys(ctl, article: list[str]) -> None:
    """In their order; the chain, the table and the choice are in it."""
    said = ctl(*article, "--json")
    answer = json.loads(said.out)
    assert said.code == 0
    assert list(answer) == KEYS
    assert answer["mem_fraction"] == 0.93
    assert answer["context_length"] == 102_400
    assert answer["kv_bytes_per_token"] == 32_768
    assert all(set(term) == {"name", "bytes", "formula", "source"} for term in answer["terms"])
    assert {row["mem_fraction"] for row in answer["table"]} >= {0.95, 0.93, 0.9, 0.85}
    assert answer["choice"]["reason"].startswith("0.93 is the highest fraction")
    assert answer["ways_out"] == []
    assert answer["flags"][:2] == ["--mem-fraction-static", "0.93"]


@pytest.mark.parametrize(("fraction", "tokens", "code"), [("0.95", 120_079, 1), ("0.93", 105_256, 0)])
def test_a_given_fraction_is_worked_out(ctl, article: list[str], fraction: str, tokens: int, code: int) -> None:
    """The tokens of the article's rows; 0.95 is the one that crashed."""
    said = ctl(*article, "--mem-fraction", fraction, "--json")
    assert said.code == code
    assert json.loads(said.out)["kv_tokens"] == pytest.approx(tokens, rel=0.01)


def test_wish_and_history_lead_to_the_articles_choice(ctl, article: list[str]) -> None:
    """At least 100k, and it ran out of memory with 0.65 GiB of headroom."""
    answer = json.loads(ctl(*article, "--min-context", "100k", "--oom-headroom", "0.65GiB", "--json").out)
    assert (answer["mem_fraction"], answer["context_length"]) == (0.93, 102_400)


def test_a_refusals_options_make_a_second_plan_fit(ctl, article: list[str]) -> None:
    """Each way out, appended to the same command line."""
    refused = ctl(*article, "--context", "200000", "--json")
    answer = json.loads(refused.out)
    assert refused.code == 1
    assert not answer["fits"]
    assert answer["ways_out"]
    for way in answer["ways_out"]:
        assert ctl(*article, "--context", "200000", *way["options"], "--json").code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        "--model llama-3.3-70b --gpu rtx3090 --engine vllm",
        "--model qwen3.6-27b --gpu 16GiB --engine sglang",
        "--model qwen3-32b --gpu 24GiB --engine llamacpp --weights 18.4GiB --context 40960",
        "--model mistral-small-24b --gpu 24GiB --engine sglang --mem-fraction 0.99",
        "--model qwen3-14b --gpu 24GiB --engine vllm --kv-pool 1GiB --context 40960",
        "--model llama-3.1-8b --gpu 24GiB --engine sglang --free 10GiB",
        "--model smollm2-135m --gpu 540MiB --engine native",
    ],
)
def test_every_way_out_on_the_command_line_works(ctl, arguments: str) -> None:
    """Whatever was given before: later options win, `auto` takes one back."""
    refused = ctl("plan", *shlex.split(arguments), "--json")
    ways = json.loads(refused.out)["ways_out"]
    assert refused.code == 1
    assert ways
    for way in ways:
        assert ctl("plan", *shlex.split(arguments), *way["options"], "--json").code == 0, way


def test_words_show_the_bar_the_chain_and_the_table(ctl, article: list[str]) -> None:
    """Without colours in a pipe."""
    said = ctl(*article)
    assert "\x1b[" not in said.out
    for words in ("fits", "█", "KV pool", "105,0", "→ 0.93", "weights", "Each 0.01 is 7,6"):
        assert words in said.out


def test_a_sentence_a_term(ctl, article: list[str]) -> None:
    """--explain."""
    said = ctl(*article, "--explain").out
    assert "free at start: 23.56 GiB free" in said
    assert "linear state: measured (given)" in said


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("cuda_oom_prefill", ["1 prefill speed: chunks of 1,024 tokens instead of 2,048", "costs no context", "2 long"]),
        ("kv_pool_too_small", ["tokens of KV cache at a fraction of 0.9"]),
        ("port_in_use", ["no other setting helps"]),
    ],
)
def test_the_rungs_below_say_what_they_give_up_and_gain(ctl, article: list[str], cause: str, said: list[str]) -> None:
    """As the supervisor would be offered them for that cause; the same in --json."""
    words = " ".join(ctl(*article, "--mem-fraction", "0.93", "--chunk", "2048", "--after", cause).out.split())
    below = words[words.index(f"fter {cause}") :]
    assert all(one in below for one in said)
    answer = json.loads(ctl(*article, "--mem-fraction", "0.93", "--chunk", "2048", "--after", cause, "--json").out)
    assert [rung["index"] for rung in answer["ladder"]] == list(range(1, 1 + len(answer["ladder"])))
    assert ("; gains " in below) == bool(answer["ladder"])


def test_flags_alone_are_a_command_line(ctl, article: list[str]) -> None:
    """For a script."""
    words = shlex.split(ctl(*article, "--flags").out)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[words.index("--context-length") + 1] == "102400"


def test_the_chain_is_drawn_as_svg(ctl, article: list[str], tmp_path: Path) -> None:
    """A well-formed file; a folder that is not there is an error in words."""
    file = tmp_path / "plan.svg"
    assert ctl(*article, "--svg", str(file)).code == 0
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert ctl(*article, "--svg", str(tmp_path / "no" / "plan.svg")).code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("", 2, "--model or --from-log is needed"),
        ("--model nosuch --gpu 24GiB", 1, "'nosuch' is no model folder"),
        ("--model ./nosuch --gpu 24GiB", 1, "'./nosuch' is no model folder"),
        ("--model qwen3-14b --gpu gtx0815", 2, "'gtx0815' is no card"),
        ("--model qwen3-14b --gpu 24GiB --kv-dtype q8_0", 2, "no KV cache in q8_0"),
        ("--model qwen3-14b --gpu 24GiB --tp 3", 2, "40 attention heads cannot be shared by 3 cards"),
        ("--model qwen3-14b --gpu 24GiB --context 999999", 2, "own limit of 40,960"),
        ("--model qwen3-14b --gpu 24GiB --context many", 2, "'many' is no number of tokens"),
        ("--model qwen3-14b --gpu 24GiB --mem-fraction 1.5", 2, "'1.5' is no fraction of the memory"),
        ("--model qwen3-14b --gpu 24GiB --mem-fraction most", 2, "'most' is no fraction"),
        ("--model qwen3-14b --gpu 24GiB --weights 5furlong", 2, "'5furlong' is no size"),
        ("--model qwen3-14b --gpu 24GiB --engine trt", 2, "'trt' is not known"),
        ("--model qwen3-14b --gpu 24GiB --off gravity", 2, "'gravity' is no feature"),
        ("--model qwen3-14b --gpu 24GiB --chunk 1", 2, "1 is less than 16"),
        ("--from-log /no/such/file", 1, "cannot be read"),
    ],
)
def test_bad_input_is_refused_in_words(ctl, arguments: str, code: int, said: str) -> None:
    """Value, limit and what to change; 2 for usage."""
    answer = ctl("plan", *shlex.split(arguments))
    assert answer.code == code
    assert said in answer.err
    assert len(answer.err.splitlines()) == 2


def test_a_model_of_the_state_folder_is_found_by_name(ctl, tmp_path: Path) -> None:
    """As `model list` names it."""
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shapes.dense()))
    said = ctl("plan", "--state-dir", str(tmp_path), "--model", "mine", "--gpu", "24GiB", "--engine", "vllm")
    assert "mine on a 24 GiB card" in said.out


def test_a_log_alone_shows_its_terms(ctl, tmp_path: Path) -> None:
    """With the lines that they stand in; as JSON too."""
    file = tmp_path / "engine.log"
    file.write_text(VLLM_NEW)
    assert "Available KV cache memory: 11.05 GiB" in ctl("plan", "--from-log", str(file)).out
    answer = json.loads(ctl("plan", "--from-log", str(file), "--json").out)
    assert (answer["engine"], answer["version"]) == ("vllm", "0.24.0")
    assert answer["figures"]["kv_tokens"]["value"] == 623_873
    assert answer["figures"]["kv_tokens"]["line"] == 5


@pytest.mark.parametrize(
    ("log", "more", "tokens"),
    [(SGLANG_0517, ["--engine-version", "0.5.17"], 120_079), (VLLM_NEW, ["--draft-tokens", "3"], 623_873), (LLAMA_NEW, [], 215_040)],
    ids=["sglang", "vllm", "llama.cpp"],
)
def test_a_log_and_a_model_show_planned_against_measured(ctl, tmp_path: Path, log: str, more: list[str], tokens: int) -> None:
    """The printed tokens come out of the printed terms, and each term is compared."""
    (tmp_path / "config.json").write_text(json.dumps(shapes.hybrid_27b()))
    (tmp_path / "engine.log").write_text(log)
    arguments = ["plan", "--from-log", str(tmp_path / "engine.log"), "--model", str(tmp_path / "config.json"), "--gpu", "rtx3090", *more]
    answer = json.loads(ctl(*arguments, "--json").out)
    assert answer["kv_tokens"] == pytest.approx(tokens, rel=0.005)
    assert "weights" in {row["name"] for row in answer["measured"]}
    words = ctl(*arguments).out
    assert "planned" in words
    assert "measured" in words


def test_a_log_of_something_else_is_refused(ctl, tmp_path: Path) -> None:
    """It says which engines are read."""
    file = tmp_path / "other.log"
    file.write_text("nothing of the kind\n")
    said = ctl("plan", "--from-log", str(file))
    assert said.code == 1
    assert "SGLang, vLLM, llama.cpp or the built-in engine" in said.err


def test_the_built_in_engine_is_planned_on_this_machine(ctl) -> None:
    """Its memory is the machine's, so no card is needed."""
    answer = json.loads(ctl("plan", "--model", "smollm2-135m", "--engine", "native", "--json").out)
    assert answer["fits"]
    assert "--kv-pool-bytes" in answer["flags"]


def test_a_cold_plan_is_quick_and_loads_no_torch(article: list[str]) -> None:
    """Under 150 ms of processor time from a cold process (the best of five: others share this machine)."""
    code = (
        "import sys; from appliance.cli.__main__ import run; code = run(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, *article, "--json"], cwd=ROOT, check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.150
