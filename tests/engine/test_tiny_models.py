"""Every family against transformers, on tiny random checkpoints of the real configuration classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from appliance.core.errors import ModelError
from appliance.engine.models.registry import read_config
from tests.engine.driver import GREEDY, Driver, differences
from tests.engine.oracle import Oracle, relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # small weights make a model that says the same whatever it reads
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": False,  # tied, a random Gemma only repeats its input
    "sliding_window_pattern": 3,
    "num_key_value_heads": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 14, "patch_size": 14,
}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied-odd-heads": lambda: transformers.LlamaConfig(
        **(SIZES | {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True})
    ),
    "llama-biased": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3-yarn-in-full": lambda: transformers.Qwen3Config(
        **SIZES,
        head_dim=24,
        rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 0.4, "truncate": False},
    ),
    "mistral-window": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-window": lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA),
    "gemma3-that-sees": lambda: transformers.Gemma3Config(
        text_config=GEMMA,
        vision_config=VISION,
        tie_word_embeddings=False,
        mm_tokens_per_image=1,
        image_token_index=9,
        boi_token_index=7,
        eoi_token_index=8,
    ),
}


def save_checkpoint(config: transformers.PreTrainedConfig, folder: Path, **options: Any) -> Path:
    """A random model of this configuration, as transformers saves it. Norms and biases are made different from 1 and 0."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(1, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_against_oracle(folder: Path, limit: float) -> None:
    """Every logit that a token was chosen from, in a batch, over several chunks and blocks."""
    oracle = Oracle(folder)
    driver = Driver(folder, kv_pool_bytes=8 * 1024**2, prefill_chunk_tokens=24)
    prompts = {f"p{length}": prompt(length, length) for length in (1, 5, 33, 64, 150)}
    for name, answer in driver.run(prompts).items():
        tokens = prompts[name] + answer.token_ids
        judged = oracle.logits(tokens)
        rows = torch.stack([answer.logits[position] for position in sorted(answer.logits)])
        error = relative_error(rows, judged[len(prompts[name]) - 1 : len(tokens) - 1])
        assert error < limit, f"{name}: relative error {error:.1e}"
        assert len(set(answer.token_ids)) > 3, "a model that always says the same tests nothing"


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    """Within 1e-5 of the largest logit, prompt and answer."""
    check_against_oracle(save_checkpoint(CASES[case](), tmp_path), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """The weights are what they are in the file; nothing more is lost."""
    check_against_oracle(save_checkpoint(CASES["llama"](), tmp_path, dtype=dtype), 1e-5)


def test_sharded_checkpoints_are_read_whole(tmp_path: Path) -> None:
    """Several files and an index."""
    save_checkpoint(CASES["qwen3"](), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_against_oracle(tmp_path, 1e-5)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(("case", "architecture"), [("gemma3", "Gemma3"), ("mistral", "Mistral3")])
def test_of_a_model_that_sees_the_language_model_is_served(case: str, architecture: str, prefix: str, tmp_path: Path) -> None:
    """By the names of its tensors in older and newer files; the rest of it is left alone."""
    alone, sees = save_checkpoint(CASES[case](), tmp_path / "alone"), tmp_path / "sees"
    sees.mkdir()
    head = "language_model.lm_head." if prefix.startswith("language_model") else "lm_head."
    tensors = {
        name.replace("model.", prefix, 1).replace("lm_head.", head): tensor
        for name, tensor in load_file(alone / "model.safetensors").items()
    }
    save_file(tensors | {"vision_tower.weight": torch.ones(3)}, sees / "model.safetensors", {"format": "pt"})
    text = json.loads((alone / "config.json").read_text())
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "text_config": text, "vision_config": VISION}
    (sees / "config.json").write_text(json.dumps(config))
    ids = prompt(60)
    found, expected = (Driver(folder, kv_pool_bytes=8 * 1024**2).run({"a": ids}) for folder in (sees, alone))
    assert not differences(found, expected)
    (sees / "config.json").write_text(json.dumps(config | {"text_config": text | {"model_type": "ministral3"}}))
    with pytest.raises(ModelError, match=r"text_config is of kind 'ministral3'; supported here: '.*'; .*engine\.backend"):
        Driver(sees)


def test_what_the_files_of_larger_gemmas_leave_out() -> None:
    """Transformers takes it for granted."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    ours = read_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    theirs = transformers.Gemma3Config(text_config=text).text_config
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.vocab_size, ours.max_context_tokens, ours.tied_embedding) == (theirs.vocab_size, theirs.max_position_embeddings, True)
    assert [layer.window_tokens for layer in ours.layers] == [1024 if kind.startswith("slid") else 0 for kind in theirs.layer_types]
    assert (ours.layers[5].rope.factor, ours.layers[0].rope.factor) == (8.0, 1.0)


def test_older_configuration_files_are_read_too(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` at the top, no layer types, no head size: as files before transformers 5 have them."""
    save_checkpoint(CASES["gemma3"](), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    config["sliding_window_pattern"] = 3
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    path.write_text(json.dumps(config))
    check_against_oracle(tmp_path, 1e-5)


@pytest.mark.parametrize("case", ["llama-tied-odd-heads", "mistral-window", "gemma3"])
@pytest.mark.parametrize("block_tokens", [1, 5, 16, 32])
def test_an_answer_depends_on_its_request_alone(case: str, block_tokens: int, tmp_path: Path) -> None:
    """To the last bit of every logit: alone, in a batch, in chunks of any size, and computed again after a preemption."""
    folder = save_checkpoint(CASES[case](), tmp_path)
    shape = {"block_tokens": block_tokens, "kv_pool_bytes": 8 * 1024**2}
    prompts = {f"p{length}": prompt(length, length) for length in (1, 2, 7, 31, 100, 127, 128, 129, 200)}
    sampling = replace(GREEDY, max_new_tokens=40)
    alone = Driver(folder, **shape).alone(prompts, sampling)
    assert not differences(alone, Driver(folder, **shape, max_running=9).run(prompts, sampling))
    assert not differences(alone, Driver(folder, **shape, prefill_chunk_tokens=16).run(prompts, sampling))
    assert not differences(alone, Driver(folder, **shape, prefill_chunk_tokens=57, max_running=3).run(prompts, sampling))
    tight = Driver(folder, **(shape | {"kv_pool_bytes": _bytes_for(folder, 950)}), prefill_fraction=0.85, max_running=9)
    assert not differences(alone, tight.run(prompts, sampling))
    assert tight.loop.stats().preemptions > 0


@pytest.mark.parametrize("case", ["llama-tied-odd-heads", "mistral-window", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_goes_on_in_the_next_life_as_if_nothing_had_happened(case: str, temperature: float, tmp_path: Path) -> None:
    """Given its first tokens and its seed, another engine chooses the same next ones from the same logits, bit for bit."""
    folder = save_checkpoint(CASES[case](), tmp_path)
    prompts = {f"p{length}": prompt(length, length) for length in (1, 31, 128, 200)}
    sampling = replace(GREEDY, max_new_tokens=40, temperature=temperature, seed=7)
    before = Driver(folder, kv_pool_bytes=8 * 1024**2).alone(prompts, sampling)
    for known in (1, 16, 39):
        driver = Driver(folder, kv_pool_bytes=8 * 1024**2, prefill_chunk_tokens=57, max_running=9)
        after = {
            name: driver.submit(name, ids, sampling, before[name].token_ids[:known])
            for name, ids in prompts.items()
            if len(before[name].token_ids) > known
        }
        assert after
        driver.loop.run_until_idle()
        for name, answer in after.items():
            whole = before[name]
            answer.token_ids[:0] = whole.token_ids[:known]
            kept = {position: row for position, row in whole.logits.items() if position >= len(prompts[name]) + known}
            assert not differences({name: replace(whole, logits=kept)}, {name: answer})
            assert answer.finish is whole.finish


def _bytes_for(folder: Path, tokens: int) -> int:
    config = json.loads((folder / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return tokens * 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * (config.get("head_dim") or hidden // heads)
