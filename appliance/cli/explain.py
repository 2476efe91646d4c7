"""`appliancectl explain`."""

from __future__ import annotations

import dataclasses

import click

from appliance.cli.printing import bold, say, say_json, table
from appliance.cli.verbs import Verb


@click.command(cls=Verb, context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
def explain(name: str | None, as_json: bool) -> None:
    """What a flag or variable of an engine really does.

    NAME is an engine's flag, an environment variable, or one of systemd's or the kernel's settings that matter for an
    engine, with or without dashes; without NAME all of them are listed.

    \b
    Examples:
      appliancectl explain --mem-fraction-static
      appliancectl explain SGLANG_REQUEST_STATE_WAIT_TIMEOUT
    """
    from appliance.diagnosis import explain as known

    if name is None:
        entries = known.explanations()
        if as_json:
            say_json([dataclasses.asdict(entry) for entry in entries])
        else:
            table(("NAME", "OF", "MEANS"), [(entry.name, ", ".join(entry.engines), entry.means) for entry in entries])
        return
    entry = known.explain(name)
    if as_json:
        say_json(dataclasses.asdict(entry))
    else:
        head, _, rest = entry.text().partition("\n")
        say(f"{bold(head)}\n{rest}")
