"""Engines: one file each. A backend turns a rung into a command line and knows how to ask its engine for a proof."""

from __future__ import annotations

from appliance.backends.protocol import OWN_VOICE, Backend, Counters, ProofRequest, Voice, WorstPrompt
from appliance.backends.registry import backend_of

__all__ = ["OWN_VOICE", "Backend", "Counters", "ProofRequest", "Voice", "WorstPrompt", "backend_of"]
