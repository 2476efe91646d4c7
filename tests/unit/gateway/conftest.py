"""What Hypothesis tries here is about what comes out; how long that takes is a matter of how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("however_busy", deadline=None)
settings.load_profile("however_busy")
