"""Twenty prompts of many kinds, for the tests against real models."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are",
    "SELECT name, COUNT(*) FROM orders",
    "In 1969, the first humans",
    "Die Hauptstadt von Deutschland ist",
    "El perro y el gato",
    "A recipe for pancakes:\n\n1.",
    "If all bloops are razzies and all razzies are lazzies, then",
    "The mitochondria is",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "Q: What is the largest planet in the solar system?\nA:",
    "She opened the door slowly and saw",
    "The stock market fell today after",
    "To be, or not to be, that is the question:",
    "This is a long prompt about nothing in particular. " * 25 + "In summary,",
)
CHATS = tuple(
    f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in ("What is gravity?", "Write a haiku about autumn.", "How do I sort a list in Python?", "Name three rivers in Europe.")
)


def encode(model: Path, texts: tuple[str, ...]) -> dict[str, list[int]]:
    """Token ids by a short name."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {f"prompt-{index}": tokenizer.encode(text).ids for index, text in enumerate(texts)}
