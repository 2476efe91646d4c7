"""The built-in engine's options."""

from __future__ import annotations

from appliance.core.plan import Rung
from appliance.core.versions import Version
from appliance.flags.vocabulary import EngineWords, OptionRules


def words(rung: Rung, version: Version) -> EngineWords:  # noqa: ARG001 - every engine's signature; it comes with us
    """As `python -m appliance.engine` takes them."""
    return EngineWords(
        (
            "--context-length", str(rung.context_length_tokens),
            "--prefill-chunk", str(rung.prefill_chunk_tokens),
            "--max-running", str(rung.max_running),
            "--block-tokens", str(rung.block_tokens or 16),
            *(("--kv-pool-bytes", str(rung.plan.kv_pool_bytes)) if rung.plan is not None else ()),
        )
    )  # fmt: skip


RULES = OptionRules(program=("python", "-m", "appliance.engine"), newest=(0,), words=words)
