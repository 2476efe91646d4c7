"""What CUDA sees of the memory on the label."""

import pytest

from appliance.core.units import GIB
from appliance.planner.gpus import CARDS, gpu_facts
from appliance.planner.inputs import PlanInputError


@pytest.mark.parametrize(
    ("named", "gib"),
    [
        ("24GiB", 23.56),
        ("24GB", 23.56),
        ("24g", 23.56),
        ("24576MiB", 23.56),
        ("24126MiB", 23.56),
        ("80GiB", 79.14),
        ("48 GiB", 47.38),
        ("16GiB", 15.62),
        ("23.58GiB", 23.58),
        ("rtx3090", 23.56),
        ("3090", 23.56),
        ("NVIDIA GeForce RTX 3090", 23.56),
        ("rtx4090", 23.52),
        ("rtx5090", 31.36),
        ("a100-80g", 79.15),
        ("A100-SXM4-80GB", 79.15),
        ("NVIDIA A100-SXM4-40GB", 39.39),
        ("h100", 79.11),
        ("NVIDIA H100 80GB HBM3", 79.11),
        ("NVIDIA RTX A6000", 47.40),
    ],
)
def test_cards_are_known_by_many_names(named: str, gib: float) -> None:
    """A whole number of GiB is a label; a fraction is what CUDA shows."""
    assert gpu_facts(named).total_bytes / GIB == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize("named", ["", "gtx0815", "24", "-5GiB", "0GiB", "GiB", "24TiB of joy"])
def test_what_is_no_card_is_refused_with_the_names_that_are(named: str) -> None:
    """The sentence has the word and what to write."""
    with pytest.raises(PlanInputError) as refused:
        gpu_facts(named)
    assert "24GiB" in str(refused.value)


def test_a_larger_label_never_shows_less() -> None:
    """Labels are whole numbers of GiB."""
    seen = [gpu_facts(f"{label}GiB").total_bytes for label in range(2, 300)]
    assert seen == sorted(seen)


def test_every_known_card_shows_less_than_the_next_label() -> None:
    """A mistyped figure would show here."""
    for name, (gib, _) in CARDS.items():
        assert 5 < gib < 200, name
