"""Whether there is a card to measure. The scripts ask before they import what only runs there."""

from __future__ import annotations

import importlib.util
import sys

import torch

EXIT_NOT_MEASURED = 77
"""Neither right nor wrong; what automake takes for a test that was skipped."""
_LEAST_CAPABILITY = (8, 0)
"""Of a card that computes in bfloat16."""


def leave_without_a_card(triton: bool = True) -> None:
    """End this process, and say why, where there is nothing to measure."""
    if (lacking := _lacking(triton)) is not None:
        print(f"not measured: {lacking}")
        sys.exit(EXIT_NOT_MEASURED)


def _lacking(triton: bool) -> str | None:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"no CUDA device is usable here (torch {torch.__version__}, {built})"
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and bfloat16 wants 8.0"
    if triton and importlib.util.find_spec("triton") is None:
        return "Triton is not installed (torch for CUDA brings it; `make venv` too)"
    return None
