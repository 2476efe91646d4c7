"""How a session keeps its children."""

from __future__ import annotations

import itertools

from appliance.cli.foreground.children import FIRST_DELAY_S, LONGEST_DELAY_S, restart_delay_s


def test_the_wait_before_a_restart_doubles_up_to_its_limit() -> None:
    """As RestartSteps would, which systemd 252 does not know."""
    waits = [restart_delay_s(failures) for failures in range(1, 9)]
    assert waits[0] == FIRST_DELAY_S
    assert all(later == min(2 * earlier, LONGEST_DELAY_S) for earlier, later in itertools.pairwise(waits))
