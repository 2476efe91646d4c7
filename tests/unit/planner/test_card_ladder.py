"""The fixed steps down, for engines on cards of which nothing was read."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import Rung
from appliance.planner.card_ladder import card_ladder, llamacpp_ladder, shorter_contexts, smaller_pools
from appliance.planner.features import FEATURES

FIRST = Rung(0, 0.93, 102_400, 2048, 4, "fp8_e4m3", state_slots=12)


def test_each_step_asks_for_less_and_says_what_it_costs() -> None:
    """Nothing ever asks for more; no two are the same; the first costs no context, the second is the article's cure."""
    ladder = (FIRST, *card_ladder(FIRST))
    asked = [(r.mem_fraction, r.context_length_tokens, r.prefill_chunk_tokens, r.max_running, -len(r.features_off)) for r in ladder]
    assert [rung.index for rung in ladder] == list(range(len(ladder)))
    assert all(all(now <= before for now, before in zip(*pair, strict=True)) for pair in zip(asked[1:], asked, strict=False))
    assert len(set(asked)) == len(asked)
    assert all(rung.gives_up and rung.gains for rung in ladder[1:])
    assert (ladder[1].prefill_chunk_tokens, ladder[1].context_length_tokens) == (1024, 102_400)
    assert ladder[2].mem_fraction == 0.91
    assert all(rung.state_slots == 3 * rung.max_running for rung in ladder)


def test_what_only_several_cards_or_a_drafter_have_is_switched_off_there() -> None:
    """And nowhere else; every word is one that the planner knows."""
    alone = frozenset().union(*(rung.features_off for rung in card_ladder(FIRST)))
    both = Rung(0, 0.9, 4096, 2048, 4, "auto", tensor_parallel=2, draft_tokens=2)
    together = frozenset().union(*(rung.features_off for rung in card_ladder(both)))
    assert together - alone == {"p2p", "custom_all_reduce", "speculative"}
    assert together <= set(FEATURES)
    assert [rung.tensor_parallel for rung in card_ladder(both)][-2:] == [2, 1]
    assert [rung.index for rung in card_ladder(both)] == list(range(1, len(card_ladder(both)) + 1))


def test_the_smallest_setting_has_little_below_it() -> None:
    """Only what is switched off."""
    least = Rung(0, 0.5, 1024, 64, 1, "auto")
    assert {frozenset({"cuda_graph"}) <= rung.features_off or len(rung.features_off) == 1 for rung in card_ladder(least)} == {True}


def test_llama_cpp_gives_up_context_first() -> None:
    """Its KV cache is taken whole at the start; 8-bit caches need flash attention, which goes last."""
    first = Rung(0, 0.9, 8192, 256, 4, "auto")
    ladder = (first, *llamacpp_ladder(first))
    assert [rung.context_length_tokens for rung in ladder[:3]] == [8192, 4096, 4096]
    assert ladder[-1].max_running == 1
    assert all(now.context_length_tokens <= before.context_length_tokens for now, before in zip(ladder[1:], ladder, strict=False))


def test_on_the_cpu_half_the_kv_cache_is_given_up() -> None:
    """It is what such an engine takes at the start; weights and the engine itself stay in the fraction, so none of it goes below them."""
    first = Rung(0, 0.9, 8192, 2048, 4, "auto")
    ladder = (first, *smaller_pools(first, 0.3))
    pools = [round(rung.mem_fraction - 0.3, 3) for rung in ladder]
    assert pools[:4] == [0.6, 0.3, 0.15, 0.075]
    assert all(now <= before for now, before in zip(pools[1:], pools, strict=False))
    assert pools[-1] > 0
    assert all(rung.gives_up and rung.gains for rung in ladder[1:])
    assert len({rung.setting for rung in ladder}) == len(ladder)
    full = replace(first, mem_fraction=0.305)  # weights leave next to nothing
    assert [(rung.mem_fraction, rung.prefill_chunk_tokens) for rung in smaller_pools(full, 0.3)] == [(0.305, 1024), (0.305, 512)]


def test_a_context_that_does_not_fit_is_cut_with_the_kv_cache_as_it_is() -> None:
    """To what the engine says would fit, then by half; an estimate that is no less helps nobody, and an unknown context stays."""
    first = Rung(2, 0.4, 32_768, 2048, 4, "auto")
    rungs = shorter_contexts(first, 20_400)
    assert [(rung.index, rung.context_length_tokens) for rung in rungs] == [(3, 19_456), (4, 9728), (5, 4864), (6, 2432)]
    assert {rung.mem_fraction for rung in rungs} == {0.4}
    assert [rung.context_length_tokens for rung in shorter_contexts(first, 40_000)] == [16_384, 8192, 4096]
    assert shorter_contexts(replace(first, context_length_tokens=0)) == ()
