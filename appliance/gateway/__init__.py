"""The HTTP face: admission, holding requests over a crash, pass-through. No torch, never on the engine's side of a decision."""
