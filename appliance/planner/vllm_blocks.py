"""The geometry of vLLM's KV cache: layers → groups of equal pages → blocks → tokens (v1/core/kv_cache_utils.py, kv_cache_interface.py).

All layers share one pool of blocks; a block is `page bytes × layers of a group`. A request of L tokens takes, from each group, as many
blocks as its kind needs. The token number that vLLM prints is made of these: from 0.20.1 int(blocks ÷ blocks a request × L), before that
blocks ÷ groups × block size. Checked to the integer against public logs (tests/unit/planner/test_vllm.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.units import GIB
from appliance.planner.chain import draft_layers, full_token_bytes, resolved_kv_dtype, sliding_token_bytes, state_slot_bytes
from appliance.planner.inputs import PlanInputs

PRINTS_CAPACITY = (0, 20, 1)
"""From here on the printed tokens come from the concurrency (0.20.0 and 0.20.1 wheels compared)."""
PADS_PAGES = (0, 27)
"""From here on a page that does not divide the largest is padded; the builds before that serve such models scaled the block first."""
_SCALE_BYTES = 4
"""One 32-bit scale for each token and head, of keys and of values, with the *_per_token_head dtypes."""
_MLA_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    Attributes:
        kind: "full", "sliding" or "state".
        layers: how many.
        block_tokens: tokens of one block; of a state group not used.
    """

    kind: str
    layers: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pool's shape.

    Attributes:
        block_bytes: of one block over all layers of a group.
        groups: of equally many layers.
        window_tokens: sliding window and the largest batch, which is what a sliding group keeps of a request.
        state_blocks: blocks that one request takes in each state group.
    """

    block_bytes: int
    groups: tuple[Group, ...]
    window_tokens: int
    state_blocks: int

    def blocks_of(self, pool_bytes: int) -> int:
        """Whole blocks in a pool."""
        return max(0, pool_bytes) // self.block_bytes if self.block_bytes else 0

    def blocks_of_request(self, tokens: int) -> int:
        """Blocks that one request of so many tokens takes (max_memory_usage_bytes of each spec)."""
        needed = 0
        for group in self.groups:
            if group.kind == "full":
                needed += -(-tokens // group.block_tokens)
            elif group.kind == "sliding":
                needed += -(-min(self.window_tokens, tokens) // group.block_tokens) + 1
            else:
                needed += self.state_blocks
        return needed

    def tokens(self, blocks: int, context_tokens: int, version: tuple[int, ...]) -> int:
        """ "GPU KV cache size": what the engine prints for so many blocks."""
        if not self.groups or context_tokens <= 0:
            return 0
        if version >= PRINTS_CAPACITY:
            return int(blocks / self.blocks_of_request(context_tokens) * context_tokens)
        attending = [group.block_tokens for group in self.groups if group.kind != "state"]
        return blocks // len(self.groups) * min(attending or [self.groups[0].block_tokens])

    def longest(self, blocks: int, limit_tokens: int, step_tokens: int) -> int:
        """The longest request, a multiple of `step_tokens`, that so many blocks hold; 0 when none."""
        low, high = 0, limit_tokens // step_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of_request(middle * step_tokens) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low * step_tokens


def geometry(inputs: PlanInputs, version: tuple[int, ...]) -> Geometry:
    """The pool's shape for resolved inputs."""
    model = inputs.model
    full = round(_token_bytes(inputs, sliding=False))
    layers = model.full_attention_layers + draft_layers(inputs)
    block = inputs.block_tokens or (_MLA_BLOCK_TOKENS if model.kv_lora_rank else 16)
    window = model.sliding_window_tokens - 1 + inputs.chunk if model.sliding_window_tokens else 0
    if model.linear:
        return _with_state(inputs, full, layers, block)
    if not model.sliding_window_layers:
        return Geometry(full * block * layers, (Group("full", layers, block),), 0, 0)
    sliding = round(_token_bytes(inputs, sliding=True))
    if not layers:
        group = Group("sliding", model.sliding_window_layers, block)
        return Geometry(sliding * block * group.layers, (group,), window, 0)
    page, full_block, sliding_block = _equal_pages(full, sliding, block, version)
    size = group_size(layers, model.sliding_window_layers)
    groups = (*_groups("full", layers, size, full_block), *_groups("sliding", model.sliding_window_layers, size, sliding_block))
    return Geometry(page * size, groups, window, 0)


def _token_bytes(inputs: PlanInputs, *, sliding: bool) -> float:
    """Bytes of one token in one layer, scales a token and head included."""
    dtype = resolved_kv_dtype(inputs)
    model, tp = inputs.model, inputs.tensor_parallel
    size = sliding_token_bytes(model, tp, dtype) if sliding else full_token_bytes(model, tp, dtype)
    if not dtype.endswith("_per_token_head"):
        return size
    heads = max(1, ((model.sliding_kv_heads if sliding else 0) or model.kv_heads) // tp)
    return size + 2 * heads * _SCALE_BYTES


def _equal_pages(full: int, sliding: int, block: int, version: tuple[int, ...]) -> tuple[int, int, int]:
    """(page bytes, tokens of a full block, of a sliding one): the smaller page grows by whole blocks to the larger one."""
    page = max(full, sliding) * block
    return page, _grown(full * block, page, block, version), _grown(sliding * block, page, block, version)


def _grown(own: int, page: int, block: int, version: tuple[int, ...]) -> int:
    """Tokens of a block of a layer whose own page is `own` bytes (unify_kv_cache_spec_page_size)."""
    divides = page % own == 0
    return block * (page // own) if divides or version < PADS_PAGES else block


def group_size(some: int, others: int) -> int:
    """Layers of a group: the fewer of the two kinds, or the more where they differ by less than half (padding beats splitting)."""
    fewer, more = sorted((some, others))
    return more if more < fewer * 1.5 else fewer


def _groups(kind: str, layers: int, size: int, block: int) -> tuple[Group, ...]:
    return tuple(Group(kind, size, block) for _ in range(-(-layers // size)))


def _with_state(inputs: PlanInputs, token_bytes: int, layers: int, block: int) -> Geometry:
    """Attention beside linear layers: the attention block grows until its page holds a state, the state is padded to it
    (Platform._align_hybrid_block_size). With the prefix cache a request keeps two states and one a draft token ("align"), else one."""
    linear_layers = inputs.model.linear_attention_layers
    drafted = inputs.draft_tokens if draft_layers(inputs) else 0
    state = state_slot_bytes(inputs, extra_steps=drafted) // linear_layers
    blocks = (2 if inputs.prefix_cache else 1) + drafted
    if not layers:
        return Geometry(state * linear_layers, (Group("state", linear_layers, block),), 0, blocks)
    grown = max(block, block * -(-state // (block * token_bytes)))
    size = group_size(layers, linear_layers)
    groups = (*_groups("full", layers, size, grown), *_groups("state", linear_layers, size, grown))
    return Geometry(grown * token_bytes * size, groups, 0, blocks)


def blocks_label(count: int, size_bytes: int) -> str:
    """For formulas."""
    return f"{count:,} blocks of {size_bytes / GIB * 1024:.2f} MiB"
