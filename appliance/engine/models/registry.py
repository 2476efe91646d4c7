"""Architecture name → how its config.json is read. A new family is one line here and one small file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.core.errors import ModelError
from appliance.engine.models.config import OTHER_ENGINES, DecoderConfig, RawConfig
from appliance.engine.models.gemma3 import read_gemma3, read_gemma3_text
from appliance.engine.models.llama import read_llama, read_mistral3_text

ARCHITECTURES: Mapping[str, Callable[[str, RawConfig], DecoderConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_llama,
    "Qwen2ForCausalLM": read_llama,
    "Qwen3ForCausalLM": read_llama,
    "Mistral3ForConditionalGeneration": read_mistral3_text,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": read_gemma3_text,
}


def read_config(fields: Mapping[str, Any]) -> DecoderConfig:
    """The decoder's configuration from config.json.

    Raises:
        ModelError: an architecture or a quantisation that the built-in engine does not serve, or a bad key.
    """
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"config.json: architectures is {names!r}, expected a list with one name")
    if names[0] not in ARCHITECTURES:
        raise ModelError(
            f"architecture {names[0]} is not supported by the built-in engine",
            hint=f"supported: {', '.join(ARCHITECTURES)}; {OTHER_ENGINES}",
        )
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"quantisation {method!r} is not supported by the built-in engine",
            hint=f"take the unquantised model (bf16, fp16 or fp32) or a GGUF file to convert; or {OTHER_ENGINES}",
        )
    return ARCHITECTURES[names[0]](names[0], RawConfig(fields))
