"""Triton's interpreter runs the kernels here, on a machine without a card. It is chosen when a kernel's module is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
