"""The engine with 8-bit weights: as good as is promised, and equal to itself to the last bit like the one in float32."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from appliance.engine.block_pool import PoolGeometry
from appliance.engine.build import load_decoder
from appliance.engine.kv_cache import CacheCorrupt, KvCache
from appliance.engine.models import decoder as float_decoder
from appliance.engine.models import int8_decoder, packed
from appliance.engine.models.int8_decoder import Int8Decoder, Paging, Span
from appliance.engine.weights import WouldCopy
from appliance_kernels.kv_write.reference import Guard, WritePlan
from appliance_kernels.refcount.reference import KEPT, OPEN, SEALED
from appliance_kernels.x86 import reference
from appliance_kernels.x86.library import kinds, library
from tests.engine.driver import GREEDY, Driver, differences
from tests.engine.oracle import relative_error
from tests.engine.prompts import PROMPTS, encode
from tests.engine.test_tiny_models import GEMMA, SIZES, YARN, prompt, save_checkpoint

ANSWERS = Path(__file__).parent / "float32_answers.json"
"""What float32 says to the twenty prompts, 64 tokens each: greedy, as tests/engine/test_real_models.py checks it against transformers."""
LEAST_AGREEMENT = 0.95
POSSIBLE = kinds(Path("/proc/cpuinfo").read_text())
FITTING = SIZES | {"intermediate_size": 192, "head_dim": 32}

pytestmark = pytest.mark.skipif(not POSSIBLE or library() is None, reason="kernels/x86 is not compiled here (tests of it say so too)")

CASES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**FITTING),
    "llama-tied-biased": lambda: transformers.LlamaConfig(**FITTING, attention_bias=True, tie_word_embeddings=True),
    "mistral-window": lambda: transformers.MistralConfig(**FITTING, sliding_window=21),
    "qwen2": lambda: transformers.Qwen2Config(**FITTING),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**FITTING, rope_parameters=YARN),
    "qwen3-odd-head": lambda: transformers.Qwen3Config(**(FITTING | {"head_dim": 48, "num_attention_heads": 6})),
    "gemma3": lambda: transformers.Gemma3TextConfig(**(GEMMA | {"intermediate_size": 192})),
}
LENGTHS = (1, 5, 33, 64, 150)


@pytest.fixture(params=POSSIBLE)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of processor that this one can play."""
    chosen = library(request.param)
    for module in (int8_decoder, packed):
        monkeypatch.setattr(module, "library", lambda: chosen)
    return str(request.param)


def driver(folder: Path, **settings: Any) -> Driver:
    """With 8-bit weights."""
    return Driver(folder, **({"kv_pool_bytes": 8 * 1024**2, "weights_dtype": "int8"} | settings))


def prompts() -> dict[str, list[int]]:
    """Of several lengths."""
    return {f"p{length}": prompt(length, length) for length in LENGTHS}


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for kind in POSSIBLE for case in CASES if case == "gemma3" or kind == POSSIBLE[0]], indirect=["kind"]
)
def test_it_computes_what_the_definition_says(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 engine with its products replaced by the definition of ours gives the same logits, but for the few activations
    that a rounding elsewhere moves over the middle between two of the 255 values."""
    folder = save_checkpoint(CASES[case](), tmp_path)
    answers = driver(folder).run(prompts())
    monkeypatch.setattr(float_decoder, "linear", reference.linear)
    judge = Driver(folder, kv_pool_bytes=8 * 1024**2)
    for name, answer in answers.items():
        first = min(answer.logits)
        judged = judge.run({name: prompts()[name]}, replace(GREEDY, max_new_tokens=1))[name].logits[first]
        error = relative_error(answer.logits[first].unsqueeze(0), judged.unsqueeze(0))
        assert error < 0.02, f"{name}: {error:.1e} with {kind}"
    assert len({token for answer in answers.values() for token in answer.token_ids}) > 5, "a model that always says the same"


@pytest.mark.parametrize(("case", "block_tokens"), [("llama", 16), ("mistral-window", 5), ("llama-tied-biased", 24), ("gemma3", 32)])
def test_an_answer_is_the_same_to_the_last_bit_whatever_else_runs(case: str, block_tokens: int, kind: str, tmp_path: Path) -> None:
    """Alone, in a batch, in small chunks, by one thread, preempted and computed again, and as a longer prompt after a crash."""
    folder = save_checkpoint(CASES[case](), tmp_path)
    sampling = replace(GREEDY, max_new_tokens=40)
    shape: dict[str, Any] = {"block_tokens": block_tokens}
    alone = driver(folder, **shape).alone(prompts(), sampling)
    assert not differences(alone, driver(folder, **shape, max_running=5).run(prompts(), sampling)), f"in a batch, {kind}"
    assert not differences(alone, driver(folder, **shape, prefill_chunk_tokens=19, threads=1).run(prompts(), sampling)), "in chunks"
    if block_tokens == 16:
        tight = driver(folder, **shape, kv_pool_bytes=_tight_pool_bytes(folder), prefill_fraction=0.75)
        assert not differences(alone, tight.run(prompts(), sampling)), "preempted"
        assert tight.loop.stats().preemptions > 0
    revived = {name: prompts()[name] + answer.token_ids[:17] for name, answer in alone.items()}
    for name, answer in driver(folder, **shape).run(revived, replace(GREEDY, max_new_tokens=4)).items():
        for position, logits in answer.logits.items():
            assert torch.equal(logits, alone[name].logits[position]), f"{name} in a new life, at {position}"


@pytest.mark.parametrize(
    ("block", "offset"), [(-1, 0), (5, 0), (2**40, 3), (0, -1), (0, 16), (1, 0), (2, 5), (3, 0)], ids=lambda number: str(number)
)
@torch.inference_mode()
def test_a_write_that_went_astray_behind_the_plan_is_not_done(block: int, offset: int, kind: str, tmp_path: Path) -> None:
    """The compiled pass looks at the word and the bounds itself: outside, free, sealed, kept. Nothing changes anywhere, and it is said."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)
    decoder = load_decoder(folder, weights_dtype="int8")
    assert isinstance(decoder, Int8Decoder)
    cache = KvCache(decoder.config, PoolGeometry(16, 3, 1))
    between_open_ones = torch.tensor([OPEN, OPEN, 0, SEALED | 1, SEALED | KEPT, OPEN, OPEN], dtype=torch.int32)
    words = between_open_ones[1:-1]
    guard = Guard(words, torch.zeros(5, dtype=torch.int64), 0, 5)
    write = WritePlan(None, torch.tensor([0, block, 4]), torch.tensor([0, offset, 2]))
    paging = Paging.of([Span(0, 3, 0, [0])], [write], 16, 3)
    layers = range(len(decoder.config.layers))
    before = [plane.clone() for layer in layers for plane in (cache.keys(layer), cache.values(layer))]
    with pytest.raises(CacheCorrupt, match=f"^{len(layers)} writes of keys and values"):
        decoder.forward(torch.tensor([5, 6, 7]), torch.arange(3), paging, cache, guard)
    after = [plane for layer in layers for plane in (cache.keys(layer), cache.values(layer))]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(1).sum(1).tolist()
        assert changed[0] > 0
        assert changed[4] > 0
        assert changed[1:4] == [0, 0, 0]
        assert changed[5:] == [0]
    cache.check_guards()


@pytest.mark.parametrize("position", [19, 20, 21, 22, 40])
@torch.inference_mode()
def test_a_window_has_its_size_to_the_token(position: int, kind: str, tmp_path: Path) -> None:
    """The new token looks back at 21 tokens, itself among them: what is changed before these changes nothing, the first of them does."""
    folder = save_checkpoint(CASES["mistral-window"](), tmp_path)
    decoder = load_decoder(folder, weights_dtype="int8")
    assert isinstance(decoder, Int8Decoder)
    guard = Guard(torch.full((5,), OPEN, dtype=torch.int32), torch.zeros(5, dtype=torch.int64), 0, 5)

    def result(changed: int | None) -> Tensor:
        cache, draw = KvCache(decoder.config, PoolGeometry(16, 3, 1)), torch.Generator().manual_seed(2)
        for layer in range(len(decoder.config.layers)):
            for plane in (cache.keys(layer), cache.values(layer)):
                plane[:3] = torch.randn(plane[:3].shape, generator=draw)
            if changed is not None:
                cache.values(layer)[changed // 16, :, changed % 16] = 1e6
        write = WritePlan(None, torch.tensor([position // 16]), torch.tensor([position % 16]))
        paging = Paging.of([Span(0, 1, position, [0, 1, 2])], [write], 16, 3)
        return decoder.forward(torch.tensor([5]), torch.tensor([position]), paging, cache, guard)

    first = max(0, position - 20)
    assert not torch.equal(result(first), result(None))
    for before in range(first):
        assert torch.equal(result(before), result(None)), f"{position} sees {before}"


def test_what_lies_behind_a_table_is_the_null_block() -> None:
    """Attention reads tiles of 16 keys: behind the last block there must be zeros, not another's numbers, which may be none."""
    spans = [Span(0, 2, 19, [3, 4, 6]), Span(2, 1, 0, [5])]
    writes = [WritePlan(torch.tensor([1]), torch.tensor([6]), torch.tensor([4])), WritePlan(None, torch.tensor([5]), torch.tensor([0]))]
    paging = Paging.of(spans, writes, 8, 9)
    assert paging.tables.tolist() == [3, 4, 6, 9, 5, 9]
    assert paging.segments.tolist() == [[0, 2, 19, 0], [2, 1, 0, 4]]
    assert (paging.rows.tolist(), paging.blocks.tolist(), paging.offsets.tolist()) == ([1, 2], [6, 5], [4, 0])
    assert paging.most_keys == 32


def _tight_pool_bytes(folder: Path) -> int:
    from appliance.engine.kv_cache import bytes_per_token
    from appliance.engine.models.registry import read_config
    from appliance.engine.weights import read_config_json

    return 29 * 16 * bytes_per_token(read_config(read_config_json(folder)))


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_the_next_token_is_that_of_float32(model: str, request: pytest.FixtureRequest) -> None:
    """In over 95 of 100 places of the twenty answers, each place with float32's own answer before it."""
    folder: Path = request.getfixturevalue(model)
    expected = json.loads(ANSWERS.read_text())[folder.name]
    decoder = load_decoder(folder, weights_dtype="int8")
    assert isinstance(decoder, Int8Decoder)
    decoder.set_threads(2)
    agreed = total = 0
    for name, ids in encode(folder, PROMPTS).items():
        answer = expected[name]
        chosen = _logits(decoder, ids + answer, len(ids) - 1)[:-1].argmax(-1).tolist()
        agreed += sum(a == b for a, b in zip(chosen, answer, strict=True))
        total += len(answer)
    print(f"{folder.name}: {agreed} of {total} ({agreed / total:.2%})")
    assert total == 20 * 64
    assert agreed / total > LEAST_AGREEMENT


@torch.inference_mode()
def _logits(decoder: Int8Decoder, token_ids: list[int], first: int) -> Tensor:
    """After every token from the first one of these on, in one pass over a cache of its own."""
    count = len(token_ids)
    blocks = math.ceil(count / 16)
    cache = KvCache(decoder.config, PoolGeometry(16, blocks, 1))
    at = torch.arange(count)
    write = WritePlan(None, at // 16, at % 16)
    paging = Paging.of([Span(0, count, 0, list(range(blocks)))], [write], 16, blocks)
    guard = Guard(torch.full((blocks,), OPEN, dtype=torch.int32), torch.zeros(blocks, dtype=torch.int64), 0, blocks)
    return decoder.logits(decoder.forward(torch.tensor(token_ids), at, paging, cache, guard)[first:])


def test_packed_weights_are_mapped_from_the_second_start_on(tmp_path: Path) -> None:
    """And made anew when the checkpoint is another, or the file is cut off; a spare makes none."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)
    with pytest.raises(WouldCopy, match=r"8-bit weights are not in .*\.int8-"):
        load_decoder(folder, 32 * 1024**2, "int8")
    first = driver(folder).run(prompts())
    (file,) = folder.glob(".int8-*")
    made = file.stat().st_mtime_ns
    spare = load_decoder(folder, 32 * 1024**2, "int8")
    assert isinstance(spare, Int8Decoder)
    assert not differences(first, driver(folder).run(prompts()))
    assert file.stat().st_mtime_ns == made
    os.truncate(file, file.stat().st_size - 1)
    assert not differences(first, driver(folder).run(prompts()))
    assert file.stat().st_mtime_ns != made
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 1))
    before = file.read_bytes()[:4096]
    driver(folder)
    assert file.read_bytes()[:4096] != before
    assert not list(folder.glob("*.part"))


def test_weights_lie_in_memory_where_the_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal is made here."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(packed, "_write", refuse)
    answers = driver(folder).run(prompts())
    monkeypatch.undo()
    assert not list(folder.glob(".int8-*"))
    assert not differences(answers, driver(folder).run(prompts()))


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"intermediate_size": 100}, "intermediate_size of 100 is no multiple of 32"),
        ({"head_dim": 24}, "head_dim of 24 is no multiple of 16"),
    ],
)
def test_a_model_that_cannot_have_it_is_served_in_float32(
    sizes: dict[str, int], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says why."""
    folder = save_checkpoint(transformers.LlamaConfig(**(FITTING | sizes)), tmp_path)
    with caplog.at_level(logging.WARNING):
        answers = driver(folder).run(prompts())
    assert f"The weights are served in 32 bits instead of 8: {why}." in caplog.text
    assert not differences(answers, Driver(folder, kv_pool_bytes=8 * 1024**2).run(prompts()))


def test_without_the_library_it_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No compiler where the package was built, or an old processor."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)
    monkeypatch.setattr(int8_decoder, "library", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_decoder(folder, weights_dtype="int8"), float_decoder.Decoder)
    assert "no compiled library of ours runs on this processor" in caplog.text


def test_a_model_with_a_number_that_is_none_fails_its_request_and_not_silently(tmp_path: Path) -> None:
    """NaN in one weight of a product reaches the logits, as in float32."""
    from safetensors.torch import load_file, save_file

    folder = save_checkpoint(CASES["llama"](), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 7] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    answer = driver(folder).run({"p": prompt(20)})["p"]
    assert answer.error is not None
    assert "no usable numbers" in answer.error


def test_damaged_books_are_noticed_as_with_float32(tmp_path: Path) -> None:
    """A stray block: refused before the pass, computed again apart, the same to the last bit."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)
    some = {name: ids for name, ids in prompts().items() if len(ids) >= 33}
    sound = driver(folder).run(some)
    for fault in ("stray", "sealed", "freed", "unreadable", "foreign"):
        hurt = driver(folder, fault=(fault, 3))
        answers = hurt.run(some)
        assert hurt.loop.stats().block_violations > 0, fault
        assert {name: answer.token_ids for name, answer in answers.items()} == {name: answer.token_ids for name, answer in sound.items()}


@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_who_gave_way_comes_back_to_the_last_bit(weights_dtype: str, tmp_path: Path) -> None:
    """Set aside and brought back, not computed again: the same answers, also when a copy finds no room; nothing stays behind."""
    folder = save_checkpoint(CASES["llama"](), tmp_path)
    sampling = replace(GREEDY, max_new_tokens=40)
    shape: dict[str, Any] = {"kv_pool_bytes": _tight_pool_bytes(folder), "prefill_fraction": 0.75, "weights_dtype": weights_dtype}
    alone = driver(folder, weights_dtype=weights_dtype).alone(prompts(), sampling)
    block_bytes = _tight_pool_bytes(folder) // 29
    for swap_bytes, some in ((64 * 1024**2, True), (block_bytes, None), (0, False)):
        tight = driver(folder, **shape, swap_bytes=swap_bytes)
        assert not differences(alone, tight.run(prompts(), sampling)), swap_bytes
        stats = tight.loop.stats()
        assert stats.preemptions > 0
        if some is not None:
            assert (stats.swaps == stats.preemptions) is some
        assert tight.runner._runner._swap.used_bytes == 0
