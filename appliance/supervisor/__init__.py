"""applianced: the process that owns the engine. Decisions are pure (machine.py, policy.py), the rest is their hands and ears."""
