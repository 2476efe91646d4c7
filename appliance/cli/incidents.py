"""`appliancectl incidents`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from appliance.cli import records
from appliance.cli.place import Place
from appliance.cli.printing import faint, moment, say, say_json, table
from appliance.cli.verbs import Verb
from appliance.core.units import format_duration


@click.command(cls=Verb)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@click.option("--patterns", "as_patterns", is_flag=True, help="Which crashes are the same one, and what sets them apart from healthy work.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs: all fields of each, without evidence.")
@click.pass_obj
def incidents(place: Place, limit: int, as_patterns: bool, as_json: bool) -> None:
    """The crashes of this box, newest first.

    Also while applianced is down: they are read from its database then.

    \b
    Example:
      appliancectl incidents --limit 5
      appliancectl incidents --patterns --limit 200
      appliancectl incidents --json | jq -r '.incidents[].diagnosis.cause' | sort | uniq -c
    """
    found = records.recent(place, limit)
    if as_patterns and (found or as_json):
        _patterns(place, found, as_json=as_json)
    elif as_json:
        say_json({"incidents": found})
    elif not found:
        say("no incidents: nothing has crashed here")
    else:
        of_cards = ("CARD",) if any(incident.get("card") for incident in found) else ()
        table(("INCIDENT", "TIME", *of_cards, "CAUSE", "DONE", "BACK AFTER"), [_row(incident, len(of_cards)) for incident in found])
        say(faint("one of them in full: appliancectl diagnose --incident ID"))


def _patterns(place: Place, found: Sequence[records.Document], *, as_json: bool) -> None:
    from appliance.cli.incident_patterns import kinds_of, show
    from appliance.control.codec import incident_from_json

    whole = (records.one(place, incident["incident_id"]) for incident in found)
    kinds = kinds_of([incident_from_json(document) for document in whole if document is not None])
    if as_json:
        say_json({"patterns": [kind.to_json() for kind in kinds]})
    else:
        show(kinds)


def _row(incident: records.Document, cards: int) -> tuple[str, ...]:
    recovered_s = incident.get("recovered_s")
    return (
        incident["incident_id"],
        moment(incident["time_s"]),
        *(incident.get("card") or "-",)[:cards],
        incident["diagnosis"]["cause"],
        incident["action"]["kind"],
        "-" if recovered_s is None else format_duration(recovered_s),
    )
