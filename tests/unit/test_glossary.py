"""docs/glossary.md: one word for one thing, wherever an owner reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.core.states import EngineState

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| word ")
]
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ("glossary.md", "structures.md")]
SURFACES = {
    "page": [*(ROOT / "appliance/gateway/page").glob("*.js"), ROOT / "appliance/gateway/page/index.html"],
    "command line": [*(ROOT / "appliance/cli").rglob("*.py"), *(ROOT / "docs/man").glob("*.[1-8]")],
    "metrics": [ROOT / "appliance/gateway/definitions.py", ROOT / "docs/metrics.md"],
    "configuration": [ROOT / "etc/appliance.toml"],
    "documentation": [ROOT / "README.md", *DOCS],
}
"""What an owner reads: files in which all words are for people, or are told by programs that are."""


def _text(surface: str) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in SURFACES[surface])


def _words(cell: str) -> list[str]:
    """ "time to first token (TTFT)" → both."""
    return [word.strip() for word in re.split(r"[,()]", cell) if word.strip()]


@pytest.mark.parametrize("surface", SURFACES)
def test_nobody_elses_words_are_used(surface: str) -> None:
    """Two words for one thing are two things to whoever reads both."""
    text = _text(surface)
    used = [word for row in ROWS for word in _words(row[2]) if re.search(rf"\b{re.escape(word)}(s|ed)?\b", text, re.IGNORECASE)]
    assert used == []


def test_every_word_is_used_by_several() -> None:
    """A word that stands in the glossary alone explains nothing."""
    texts = {surface: _text(surface).lower().replace("_", " ") for surface in SURFACES}
    alone = {
        row[0]: found
        for row in ROWS
        if len(found := [surface for surface, text in texts.items() if any(word.lower() in text for word in _words(row[0]))]) < 2
    }
    assert alone == {}


def test_the_states_are_those_that_there_are() -> None:
    """In the order of their declaration."""
    (told,) = [row[1] for row in ROWS if row[0] == "state"]
    states = [state.value.replace("_", " ") for state in EngineState]
    assert [word.strip().lower() for word in told.partition(": ")[2].split(",")] == states
