"""The state machine of one engine, as a pure reducer: `step(state, event, now_s) -> (state, effects)`.

It never looks at a clock, a process or a device. Three promises hold in every state and for every event
(tests/unit/supervisor/test_machine_properties.py):
* never two engines alive: a Spawn is emitted only when the previous group is known to be empty;
* never SERVING or DEGRADED without a probe answered and a proof passed by this very life;
* every move is in core's table, and what is published follows from the state alone, at each change and only then.
"""

from appliance.supervisor.machine.reducer import step
from appliance.supervisor.machine.state import MachineState, Purpose, publication_of

__all__ = ["MachineState", "Purpose", "publication_of", "step"]
