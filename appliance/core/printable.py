"""Words from outside in a line of ours: they may neither begin a line, nor move the cursor, nor turn the reading direction around."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """With everything that is not printable written as an escape: "a\\x1b[2Jb", "one\\ntwo"; but for what is in `keep`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else each.encode("unicode_escape").decode("ascii") for each in text)
