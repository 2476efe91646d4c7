"""What clients are told whom the queue does not take, or not in time. Pure."""

from __future__ import annotations

from appliance.gateway.envelope import Refused


def queue_full(in_use: int, capacity: int, limit: int, retry_after_s: float) -> Refused:
    """As many wait as may."""
    return Refused(
        429,
        "queue_full",
        f"{in_use} requests run ({capacity} slots) and {limit} wait, which is the limit of {limit}",
        hint="try again later, or raise [admission] queue_size",
        retry_after_s=retry_after_s,
    )


def key_queue_full(flow: str, waiting: int, limit: int, retry_after_s: float) -> Refused:
    """Of one key."""
    return Refused(
        429,
        "key_queue_full",
        f"{waiting} requests of the key {flow!r} wait, which is its limit of {limit}",
        hint="try again when some are answered, or raise max_queued of the key",
        retry_after_s=retry_after_s,
    )


def deadline_unmeetable(wait_s: float, position: int, left_s: float) -> Refused:
    """Now, and not after a wait that is for nothing."""
    return Refused(
        429,
        "deadline_unmeetable",
        f"its slot becomes free in about {wait_s:.1f} s ({position} go before it), and its client waits {left_s:.1f} s",
        hint="try again later, or allow more with X-Request-Timeout or [admission] request_timeout_s",
        retry_after_s=wait_s or 1.0,
    )


def queue_timeout(limit_s: float, which: str, in_use: int, waiting: int, retry_after_s: float) -> Refused:
    """It has waited as long as it may; `which` says so."""
    return Refused(
        429,
        "queue_timeout",
        f"no slot became free within {limit_s:.4g} s; {in_use} requests run and {waiting} wait",
        hint=f"try again later, or raise {which} or max_concurrent_decodes",
        retry_after_s=retry_after_s,
    )


def memory_short(why: str, waited_s: float, retry_after_s: float) -> Refused:
    """The same for one that was held back for its memory."""
    return Refused(
        503,
        "memory_short",
        f"{why}; it was to go in alone, and for {waited_s:.4g} s others ran",
        hint="try again later, with a shorter prompt, or free memory on the card ([admission] vram_red_line)",
        retry_after_s=retry_after_s,
    )
