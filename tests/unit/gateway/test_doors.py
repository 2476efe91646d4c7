"""The gates of several engines as one: what is open, what is said, what comes of an engine that is not there any more."""

from __future__ import annotations

import asyncio

import pytest

from appliance.core.launch import Endpoint, EngineLimits
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.gate import STOPPED_HOLD_S, Standing
from appliance.gateway.resume import LifeName
from appliance.gateway.upstream import LossKind, UpstreamLost

STATES = EngineState
LIMITS = EngineLimits("m", 4096, 8, 32768, paths=("/v1/models", "/v1/chat/completions"))


def part(state: EngineState = STATES.SERVING, generation: int = 1, *, port: int = 1, **given: object) -> Publication:
    """One engine's."""
    serves = state in (STATES.SERVING, STATES.DEGRADED)
    endpoint, limits = (Endpoint(port=port), LIMITS) if serves else (None, None)
    retry_after_s = None if serves or state is STATES.PARKED else 3.0
    said: dict[str, object] = {"reason": f"it is {state.value}", "retry_after_s": retry_after_s, **given}
    return Publication(state, generation, endpoint, limits, **said)  # type: ignore[arg-type]


def whole(*parts: Publication) -> Publication:
    """All together, as applianced says it."""
    first = parts[0]
    return Publication(first.state, 9, first.endpoint, first.limits, "the sum of it", first.retry_after_s, replicas=parts)


@pytest.mark.parametrize(
    ("first", "second", "standing"),
    [
        (STATES.SERVING, STATES.SERVING, Standing.OPEN),
        (STATES.BACKOFF, STATES.SERVING, Standing.OPEN),
        (STATES.PARKED, STATES.DEGRADED, Standing.OPEN),
        (STATES.STARTING, STATES.PARKED, Standing.HOLD),
        (STATES.BACKOFF, STATES.PLANNING, Standing.HOLD),
        (STATES.PARKED, STATES.PARKED, Standing.REFUSE),
    ],
)
async def test_the_best_of_them_counts(first: EngineState, second: EngineState, standing: Standing) -> None:
    """One that is open is enough; while one may come back, clients are held; when none will, they are told."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(first), part(second, port=2)))
    assert doors.standing is standing
    assert doors.several


async def test_one_engine_is_one_gate() -> None:
    """Without replicas all is that gate's, and its lives have no index."""
    doors = Doors(lambda: None)
    assert doors.standing is Standing.HOLD
    doors.publish(part(generation=3))
    (life,) = doors.lives()
    assert (doors.several, life.replica, life.index, str(life), life.name) == (False, None, 0, "generation 3", LifeName(3))
    doors.publish(part(STATES.PARKED, 3))
    assert (doors.sentence, doors.refusal().code) == ("it is parked", "engine_parked")


async def test_what_people_are_told_names_the_engine_that_is_out() -> None:
    """applianced's own sentence, except where a request has just seen otherwise. All are out: when the one is back that is first."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(), part(STATES.BACKOFF, port=2)))
    assert doors.sentence == "the sum of it"
    doors.lost(doors.lives()[0], UpstreamLost(LossKind.RESET, "reset"))
    why = "the connection to the engine was lost (reset: reset); applianced is finding out why"
    assert doors.sentence == f"0 of 2 engines answer; engine 0: {why}; engine 1: it is backoff"
    doors.publish(
        whole(part(STATES.BACKOFF, retry_after_s=7.0, incident_id="a"), part(STATES.STARTING, retry_after_s=2.0, incident_id="b"))
    )
    refused = doors.refusal()
    assert (refused.status, refused.code, refused.retry_after_s, refused.incident_id) == (503, "engine_unavailable", 2.0, "b")
    assert refused.message == "the sum of it"
    doors.publish(whole(part(STATES.STOPPED), part(STATES.STOPPED)))
    doors.control_lost("nobody listens")
    assert not doors.connected
    assert doors.sentence == "0 of 2 engines answer: the engine was stopped, and applianced does not run: nobody listens"


async def test_a_lost_connection_shuts_its_own_engine_only() -> None:
    """And the other's generation of the same number is another life."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(), part(port=2)))
    first, second = doors.lives()
    assert (first.name, second.name, str(second)) == (LifeName(1, 0), LifeName(1, 1), "generation 1 of engine 1")
    assert doors.lost(first, UpstreamLost(LossKind.RESET, "reset"))
    assert not doors.lost(first, UpstreamLost(LossKind.RESET, "reset")), "not the first"
    assert (doors.standing, doors.open_replicas(), doors.lives()) == (Standing.OPEN, [1], [second])
    assert (doors.serves(first.name), doors.serves(second.name), doors.serves(LifeName(1, 5))) == (False, True, False)
    assert doors.life_of(0) is None
    doors.publish(whole(part(STATES.BACKOFF), part(port=2)))
    doors.publish(whole(part(generation=2, port=3), part(port=2)))
    assert doors.open_replicas() == [0, 1]
    assert doors.lives()[1] is second, "nothing has happened to it"
    assert [death.life for death in doors.deaths] == [first.name]
    doors.explained([second.name])
    assert len(doors.deaths) == 1
    doors.explained([first.name])
    assert not doors.deaths


async def test_news_of_any_engine_wake_who_waits() -> None:
    """Each waits for its own life's end, and looks again whenever something is heard."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(), part(port=2)))
    first, second = doors.lives()
    doors.lost(first, UpstreamLost(LossKind.RESET, "reset"))
    judging = asyncio.create_task(doors.gate_of(first).judged(first, 20.0))
    lasting = asyncio.create_task(doors.outlives(second, 0.2))
    await asyncio.sleep(0)
    doors.publish(whole(part(STATES.BACKOFF), part(port=2)))
    assert await asyncio.wait_for(judging, 5.0) is True
    assert await lasting is True


async def test_engines_come_and_go_with_the_configuration() -> None:
    """A gateway outlives an applianced that comes back with one engine more, or less; what is with the old one may still ask for it."""
    doors = Doors(lambda: None)
    doors.publish(part(generation=4))
    (alone,) = doors.lives()
    doors.publish(whole(part(generation=5), part(port=2)))
    assert (doors.several, [str(life) for life in doors.lives()]) == (True, ["generation 5 of engine 0", "generation 1 of engine 1"])
    assert doors.life_of(0) is not alone
    gone = doors.lives()[1]
    doors.publish(part(generation=6))
    assert (doors.several, [str(life) for life in doors.lives()]) == (False, ["generation 6"])
    assert doors.gate_of(gone).life is None
    assert doors.gate_of(gone).sentence == "this engine is not configured any more"
    assert doors.standing is Standing.OPEN


async def test_an_unknown_path_is_refused_by_what_any_engine_said() -> None:
    """Also while that one is away."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(STATES.STARTING), part(port=2)))
    doors.publish(whole(part(STATES.STARTING), part(STATES.BACKOFF)))
    doors.check_path("/v1/models")
    with pytest.raises(Refused, match="no endpoint /v1/embeddings"):
        doors.check_path("/v1/embeddings")


async def test_a_stop_of_all_is_waited_over_like_a_stop_of_one() -> None:
    """It may be a restart: clients are held for STOPPED_HOLD_S."""
    doors = Doors(lambda: None)
    doors.publish(whole(part(STATES.STOPPED), part(STATES.STOPPED)))
    assert STOPPED_HOLD_S > 1
    assert doors.standing is Standing.HOLD
