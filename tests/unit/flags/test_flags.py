"""Rungs in engines' words, by version, and what may not stand in engine.extra_args."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance import flags
from appliance.core.plan import Rung
from appliance.core.versions import version_of
from appliance.flags import EngineWords
from appliance.planner.features import FEATURES
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

RUNG = Rung(0, 0.93, 102_400, 2048, 3, "fp8_e4m3", state_slots=9, state_dtype="bfloat16")


def said(engine: str, rung: Rung, version: str = "") -> tuple[str, ...]:
    """The options."""
    return words(engine, rung, version).arguments


def words(engine: str, rung: Rung, version: str = "") -> EngineWords:
    """Options and variables."""
    rules = flags.rules_of(engine)
    return rules.words(rung, version_of(version, rules.newest))


def value(arguments: tuple[str, ...], option: str) -> str:
    """What follows it."""
    return arguments[arguments.index(option) + 1]


def test_sglang_is_spoken_to_in_its_versions_language() -> None:
    """Options were renamed in 0.5.14; both spellings ask for the same."""
    old, new = said("sglang", RUNG, "0.5.13"), said("sglang", RUNG, "0.5.14")
    assert value(old, "--cuda-graph-max-bs") == value(new, "--cuda-graph-max-bs-decode") == "3"
    assert value(old, "--mamba-scheduler-strategy") == value(new, "--mamba-radix-cache-strategy") == "no_buffer"
    for arguments in (old, new):
        assert value(arguments, "--mem-fraction-static") == "0.93"
        assert value(arguments, "--max-mamba-cache-size") == "9"
        assert value(arguments, "--mamba-ssm-dtype") == "bfloat16"


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp"])
@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"state_float32", "current_runtime", "speculative", "overlap_schedule"}))
def test_a_feature_that_is_off_is_said(engine: str, feature: str) -> None:
    """Two rungs that differ in a feature are two commands, where the engine has the feature."""
    if engine == "llamacpp" and feature in ("p2p", "custom_all_reduce"):
        return  # its cards talk through the host unless it was built otherwise, and it has no all-reduce
    before = replace(RUNG, tensor_parallel=2)
    assert words(engine, before) != words(engine, replace(before, features_off=frozenset({feature})))


def test_two_cards_are_tried_before_they_are_trusted() -> None:
    """Whether one reads the other's memory is tested at the start, not believed of the driver; off is off; one card says nothing."""
    two = replace(RUNG, tensor_parallel=2)
    off = replace(two, features_off=frozenset({"p2p"}))
    assert "--enable-p2p-check" in said("sglang", two)
    assert words("vllm", two).environment == {"VLLM_SKIP_P2P_CHECK": "0"}
    for engine in ("sglang", "vllm"):
        assert words(engine, off).environment == {"NCCL_P2P_DISABLE": "1"}
        assert "--enable-p2p-check" not in said(engine, off)
        assert words(engine, RUNG).environment == {}


def test_no_speculation_and_no_overlap_are_said() -> None:
    """The drafter's options go; the scheduler is told to wait."""
    drafting = replace(RUNG, draft_tokens=3)
    off = replace(drafting, features_off=frozenset({"speculative", "overlap_schedule"}))
    assert value(said("sglang", drafting), "--speculative-num-draft-tokens") == "3"
    assert '"num_speculative_tokens":3' in value(said("vllm", drafting), "--speculative-config")
    assert not [option for option in (*said("sglang", off), *said("vllm", off)) if "speculative" in option]
    assert "--disable-overlap-schedule" in said("sglang", off)
    assert "--no-async-scheduling" in said("vllm", off)


def test_vllms_attention_backend_moved_from_a_variable_to_an_option() -> None:
    """Triton's backend by its name and place of each version."""
    rung = replace(RUNG, features_off=frozenset({"attention_backend"}))
    assert words("vllm", rung, "0.10.2").environment == {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN_VLLM_V1"}
    assert words("vllm", rung, "0.12.0").environment == {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}
    assert words("vllm", rung, "0.13.0").environment == {}
    assert value(said("vllm", rung, "0.13.0"), "--attention-backend") == "TRITON_ATTN"


def test_a_dtype_that_a_version_does_not_have_is_left_to_it() -> None:
    """vLLM 0.10 refuses a linear state in bfloat16 and a KV cache that says its 16 bits; it then takes the model's."""
    rung = replace(RUNG, kv_dtype="bfloat16")
    assert "--mamba-ssm-cache-dtype" not in said("vllm", rung, "0.10.2")
    assert value(said("vllm", rung, "0.10.2"), "--kv-cache-dtype") == "auto"
    assert value(said("vllm", rung, "0.32.0"), "--mamba-ssm-cache-dtype") == "bfloat16"
    assert value(said("llamacpp", RUNG), "--cache-type-k") == value(said("llamacpp", RUNG), "--cache-type-v") == "q8_0"


def test_a_context_that_nobody_knows_is_the_engines_to_find() -> None:
    """0: vLLM takes as much as fits where it can, the others what the model says."""
    rung = replace(RUNG, context_length_tokens=0)
    assert value(said("vllm", rung), "--max-model-len") == "auto"
    assert "--max-model-len" not in said("vllm", rung, "0.13.0")
    assert "--context-length" not in said("sglang", rung)
    assert value(said("llamacpp", rung), "--ctx-size") == "0"


def test_what_was_planned_is_what_is_said() -> None:
    """A plan's rung carries all that its engine is told: context, fraction, state slots, cards."""
    model = shapes.facts(shapes.hybrid_27b())
    measured = {"weight": 17.67, "linear_state": 0.73}
    choice = plan(shapes.inputs(model, "24GiB", "sglang", kv_dtype="fp8_e4m3", max_running=3, measured=measured))
    arguments = said("sglang", choice.rung)
    assert value(arguments, "--context-length") == str(choice.plan.context_length_tokens)
    assert value(arguments, "--mem-fraction-static") == f"{choice.plan.mem_fraction:g}"
    assert value(arguments, "--max-mamba-cache-size") == "9"
    two = plan(shapes.inputs(model, "rtx3090", "vllm", tensor_parallel=2, draft_tokens=3, language_only=True))
    arguments = said("vllm", two.rung)
    assert value(arguments, "--tensor-parallel-size") == "2"
    assert "--language-model-only" in arguments
    assert '"num_speculative_tokens":3' in value(arguments, "--speculative-config")
    assert value(said("native", replace(two.rung, plan=two.plan)), "--kv-pool-bytes") == str(two.plan.kv_pool_bytes)


@pytest.mark.parametrize(
    ("engine", "version", "option", "words"),
    [
        ("sglang", "0.5.17", "--disable-flashinfer", ("since 0.4", "--attention-backend triton")),
        ("sglang", "0.5.23", "--cuda-graph-max-bs=4", ("since 0.5.20", "engine.max_running")),
        ("sglang", "0.5.17", "--mem-fraction-static", ("budget.mem_fraction",)),
        ("sglang", "0.5.17", "--mem-frac", ("short for --mem-fraction-static", "budget.mem_fraction")),
        ("sglang", "0.5.17", "--api-key=secret", ("gateway.api_keys_file",)),
        ("vllm", "0.32.0", "--max_model_len", ("engine.context_length_tokens",)),
        ("vllm", "0.32.0", "--swap-space", ("since 0.20",)),
        ("vllm", "0.32.0", "-tp", ("engine.tensor_parallel",)),
        ("llamacpp", "", "-c", ("engine.context_length_tokens",)),
        ("llamacpp", "", "--no-slots", ("hangs",)),
    ],
)
def test_an_option_that_cannot_stand_there_is_refused_with_what_to_do(
    engine: str, version: str, option: str, words: tuple[str, ...]
) -> None:
    """Gone, set by the appliance, or shutting the gateway out: the sentence names the option and the cure."""
    rules = flags.rules_of(engine)
    (remark,) = rules.remarks((option, "1"), version_of(version, rules.newest))
    assert remark.is_refusal
    for word in (option.partition("=")[0], "engine.extra_args", *words):
        assert word in remark.sentence


def test_an_option_is_gone_from_the_version_on_that_dropped_it() -> None:
    """Not before, and not where it came back."""
    rules = flags.rules_of("vllm")
    assert rules.remarks(("--swap-space", "4"), (0, 13, 0)) == ()
    assert rules.remarks(("--disable-log-requests",), (0, 32, 0))[0].is_refusal
    assert rules.remarks(("--disable-log-requests",), (0, 33, 0)) == ()


@pytest.mark.parametrize(
    ("engine", "option"), [("sglang", "--dist-init-addr"), ("vllm", "--master-addr"), ("vllm", "--data-parallel-address")]
)
def test_an_engine_over_several_nodes_is_allowed_and_its_open_door_named(engine: str, option: str) -> None:
    """Its nodes trust whoever reaches their port."""
    rules = flags.rules_of(engine)
    for extra in ((option, "10.0.0.11:5000"), (f"{option}=10.0.0.11:5000",)):
        (remark,) = rules.remarks(extra, rules.newest)
        assert not remark.is_refusal
        assert "runs code as the engine" in remark.sentence
    assert "this machine alone" in rules.remarks(("--nnodes", "2"), rules.newest)[0].sentence


def test_a_danger_is_named_and_allowed() -> None:
    """With what it does."""
    (remark,) = flags.rules_of("sglang").remarks(("--crash-dump-folder", "/var/tmp"), (0, 5, 17))
    assert not remark.is_refusal
    assert "what clients asked" in remark.sentence


def test_what_is_nobodys_business_is_let_through() -> None:
    """Other options, their values, negative numbers."""
    args = ("--tool-call-parser", "qwen3_coder", "--schedule-conservativeness", "-1.5", "--reasoning-parser=qwen3")
    assert flags.rules_of("sglang").remarks(args, (0, 5, 17)) == ()
