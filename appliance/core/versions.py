"""Version numbers as tuples."""

from __future__ import annotations

Version = tuple[int, ...]


def version_of(text: str, newest: Version) -> Version:
    """(0, 5, 17) of "0.5.17", "v0.5.17.post1" or "0.20.2rc1"; the newest known where nothing is given or readable."""
    numbers: list[int] = []
    for part in text.lower().removeprefix("v").split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if len(digits) != len(part):
            break
    return tuple(numbers[:3]) if numbers else newest
