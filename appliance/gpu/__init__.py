"""Ears for the cards: the kernel log, the readiness of driver and device nodes, NVML in a child that may hang. Standard library only.

Each reader says what it cannot do and why (`problem`): a deaf sensor is a degraded one, never a crash.
"""
