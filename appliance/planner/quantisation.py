"""What config.json's quantization_config makes of a linear layer: bits a number, and which layers it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LEFT_ALONE = ("lm_head", "visual", "vision", "mtp", "embed", "merger", "projector")
"""Kept in the model's dtype unless the configuration says otherwise."""
_IGNORE_KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude", "modules_to_not_quantize")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Of the linear layers.

    Attributes:
        bits_each: bits a number takes, scales and zero points of its group included; None: not quantised.
        label: in words, for the facts.
        ignored: names (or "re:..." patterns) of modules that stay in the model's dtype.
        kept: module pattern → bits, for layers with a width of their own (AutoRound's extra_config).
        head_too: whether the output projection is covered.
        experts_only: only the experts are covered (gpt-oss).
    """

    bits_each: float | None = None
    label: str = ""
    ignored: tuple[str, ...] = ()
    kept: tuple[tuple[str, float], ...] = ()
    head_too: bool = False
    experts_only: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantisation:
        """Read quantization_config (or compression_config), wherever it stands."""
        for source in (config, text):
            for key in ("quantization_config", "compression_config"):
                quant = source.get(key)
                if isinstance(quant, Mapping) and quant:
                    return _read(quant)
        return cls()

    def bits(self, module: str, linear: bool, plain_bits: float) -> float:
        """Bits of each number of this module's weight."""
        for pattern, kept_bits in self.kept:
            if _names(pattern, module):
                return kept_bits
        if self.bits_each is None or not linear or (self.experts_only and ".experts." not in module):
            return plain_bits
        if module == "lm_head":
            return self.bits_each if self.head_too else plain_bits
        left_alone = any(word in module for word in _LEFT_ALONE) or any(_names(pattern, module) for pattern in self.ignored)
        return plain_bits if left_alone else self.bits_each


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of an exception list speaks of this module; layer numbers are those of layer 0."""
    if pattern.startswith("re:"):
        try:
            return re.search(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    plain = re.sub(r"\.\d+\.", ".0.", pattern.strip("*.")).replace("language_model.", "").removeprefix("model.")
    return bool(plain) and plain in module


def _read(quant: Mapping[str, Any]) -> Quantisation:
    method = str(quant.get("quant_method") or quant.get("quant_algo") or "").lower()
    ignored = tuple(str(name) for key in _IGNORE_KEYS for name in (quant.get(key) or ()))
    head_too = bool(quant.get("lm_head") or quant.get("quant_lm_head"))
    kept = _kept(quant.get("extra_config") or quant.get("dynamic"))
    bits, label = _width(method, quant)
    return Quantisation(bits, label, ignored, kept, head_too, experts_only=method == "mxfp4")


def _kept(extra: object) -> tuple[tuple[str, float], ...]:
    """Layers with a width of their own; sixteen bits mean "left alone"."""
    if not isinstance(extra, Mapping):
        return ()
    return tuple(
        (str(name) if not str(name).startswith(("-:", "+:")) else "re:" + str(name)[2:], float(setting["bits"]))
        for name, setting in extra.items()
        if isinstance(setting, Mapping) and isinstance(setting.get("bits"), int)
    )


def _width(method: str, quant: Mapping[str, Any]) -> tuple[float | None, str]:
    """Bits a number and the words for it, by method."""
    algorithm = str(quant.get("quant_algo") or quant.get("format") or "").lower()
    if "nvfp4" in algorithm or "nvfp4" in method or "fp4" in method:
        mx = method == "mxfp4"
        return (4 + 8 / 32, "mxfp4") if mx else (4 + 8 / 16, "nvfp4")
    if method in ("fp8", "fbgemm_fp8", "w8a8_fp8") or "fp8" in algorithm:
        return 8 + (32 / (128 * 128)), "fp8"
    if method == "compressed-tensors":
        return _compressed_tensors(quant)
    if method in ("bitsandbytes", "bnb"):
        four = bool(quant.get("load_in_4bit") or quant.get("_load_in_4bit"))
        return (4.127, "bitsandbytes 4 bit") if four else (8.0, "bitsandbytes 8 bit")
    bits = quant.get("bits") or quant.get("w_bit") or quant.get("wbits")
    if not isinstance(bits, int | float) or bits <= 0:
        return None, method
    return _grouped(method or "quantised", float(bits), quant.get("group_size") or quant.get("q_group_size"), zeros=True)


def _compressed_tensors(quant: Mapping[str, Any]) -> tuple[float | None, str]:
    """The first group's weights; mixed groups are rare enough to be told by --weights."""
    groups = quant.get("config_groups")
    first: object = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or not weights.get("num_bits"):
        return None, "compressed-tensors"
    bits = float(weights["num_bits"])
    if bits >= 8:
        return bits + 16 / 4096, f"compressed-tensors {bits:g} bit"
    return _grouped("compressed-tensors", bits, weights.get("group_size"), zeros=not weights.get("symmetric", True))


def _grouped(method: str, bits: float, group_size: object, *, zeros: bool) -> tuple[float, str]:
    """bits + a 16-bit scale, and a zero point as wide as a number, for each group."""
    group = int(group_size) if isinstance(group_size, int) and group_size > 0 else 4096  # -1: one group a column
    width = bits + 16 / group + (bits / group if zeros else 0)
    return width, f"{method} {bits:g} bit, groups of {group}"
