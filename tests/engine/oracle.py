"""Hugging Face transformers as the judge: same folder, float32, no network. Tests only; the engine never imports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Oracle:
    """One model of transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[tokens, vocab_size]: after each token."""
        logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    @torch.inference_mode()
    def generate(self, token_ids: Sequence[int], new_tokens: int) -> list[int]:
        """Greedy, by transformers' own loop."""
        ids = self._model.generate(
            torch.tensor([list(token_ids)]), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return ids[0, len(token_ids) :].tolist()


def relative_error(ours: Tensor, oracle: Tensor) -> float:
    """Largest difference of a row, over the row's largest logit."""
    return float(((ours - oracle).abs().amax(-1) / oracle.abs().amax(-1)).max())
