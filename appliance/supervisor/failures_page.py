"""docs/failures.md, written from the tables of diagnosis and policy: `python -m appliance.supervisor.failures_page`."""

from __future__ import annotations

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence
from appliance.diagnosis.catalogue import load_catalogue
from appliance.diagnosis.causality import edges
from appliance.diagnosis.pattern import TIERS, Kind
from appliance.diagnosis.remedies import remedies_of, sentence_of
from appliance.diagnosis.samples import sample_of
from appliance.planner.ladder import moves_against
from appliance.supervisor.policy import FAIR_TRIAL_S, TABLE, WAITED_STARTS, Response, Row
from appliance.supervisor.settings import MachineSettings

HEAD = """# Failures: what ends an engine, and what is done about it

Written from the tables of `appliance/diagnosis` and `appliance/supervisor/policy.py`; change those, then `make format`.

A verdict is made in four steps: lines become events (patterns), events become definite in their company (rules: the phase of an
allocation failure, who asked for a stop, whose process an Xid names), deeper events explain shallower ones inside a window of time
(tiers and named edges), and the root is the event that nothing else explains. `unknown` is an answer: the evidence is kept.

A verdict is `high`, `medium` or `low`, and says why it is not high: words of trouble that no pattern knows, a fault that others show
themselves as, a log that breaks off, a file that was not given (docs/adr/0092-how-sure-a-verdict-is.md).
"""
RULES = f"""## What holds for every cause

* Which rung is the safer one, the planner works out when it is needed, for this cause and from the setting that failed
  (docs/budget.md, "The ladder"). Each cause below has its moves, the cheapest first; one that was made already comes last, and
  what the engine cannot be told is left out. Where model or card cannot be read, and for the built-in engine, there are fixed steps
  instead, of which a cause takes the next one that may help.
* A setting that failed is not offered again further down, and causes that ask for opposite moves are met in another dimension: nothing
  goes in a circle, it ends on a rung that serves, or PARKED.
* The same rung is not tried a third time for the same cause, unless no rung can be to blame, or it is the last one and the engine
  had served for {FAIR_TRIAL_S / 60:g} minutes and failed by chance: an endpoint that is up between crashes is not parked.
* {MachineSettings().start_failures_max} failed starts in a row (`supervisor.start_failures_max`) are PARKED, whatever their causes were;
  {WAITED_STARTS} where the cause may pass by itself: about four minutes of waiting.
* A runtime that has never served and fails its start is left for the one that served last (`appliancectl runtime list`), unless the
  machine or the model is to blame.
* A proof run (`ladder.prove`) that finds too little memory left takes the next rung that asks for less at once: no failed start, no
  wait. The last rung is served all the same, and `appliancectl status` says so.
* The first restart is immediate; the next ones wait: `supervisor.backoff_first_s`, twice that, and so on to `backoff_max_s`.
  An hour of service (`supervisor.stable_after_s`) makes everything whole again.
* PARKED means that a person is needed: applianced stays up, clients get 503 with the sentence, `appliancectl resume` tries again.
* A failure that somebody brought about from outside (a signal that we did not send, SIGSTOP) is never held against a rung.
"""

OWN = """## Your own patterns

A `*.toml` file in `/etc/llm-appliance/patterns.d` (`diagnosis.patterns_dir`) adds patterns of lines that only your machine prints;
`appliancectl diagnose` reads it at once, applianced when it starts. A file with a mistake is left out with a warning that names file and
pattern. A pattern needs all of this but `tier`, `rank` and `fatal`:

```toml
[[pattern]]
id = "site.raid_gone"
kind = "cause"                       # or benign, with a cause that begins with ok_
event = "model_missing"              # the cause again
cause = "model_missing"              # one of the labels on this page
tier = 2                             # how deep: see the last section
rank = 10                            # inside the tier; the lower number is the deeper cause
fatal = true                         # this line alone means that the engine is gone: it is then killed and restarted
sources = ["engine_log"]             # or kernel_log, systemd
source = "our mount script"          # which program prints it
literals = ["RAID volume"]           # one of them stands in every such line
regex = "RAID volume \\\\S+ is gone"   # searched in the line
samples = ["RAID volume md0 is gone"]
```
"""

_DOES: dict[Response, str] = {
    Response.SAFER: "Restarts at once on a safer rung",
    Response.SAME_THEN_SAFER: "Restarts on the same rung, for it may have been chance; the second time on a safer one",
    Response.OUTSIDE: "Restarts on the same rung, as often as needed: no setting of ours did it.",
    Response.WAIT: "Waits, then tries the same rung again: something else has to change, and may do so by itself.",
    Response.WAIT_FOR_GPU: "Waits until driver and cards can be used again, then starts on the same rung.",
    Response.LOST_CARD: "Goes on with the remaining cards where a rung fits them, and leaves this one alone; else it parks.",
    Response.PARK: "Parks: trying again cannot help, a person is needed.",
}
_IF_GONE = "Nothing is wrong. Should an engine be gone with no more evidence than this, it is restarted on the same rung."


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip("\n"), "", RULES.rstrip("\n"), "", OWN.rstrip("\n")]
    for group in dict.fromkeys(cause.group for cause in Cause):
        lines += ["", f"## {group[0].upper()}{group[1:]}"]
        for cause in Cause:
            if cause.group == group:
                lines += ["", *_section(cause)]
    return "\n".join([*lines, "", *_depth()]) + "\n"


def _section(cause: Cause) -> list[str]:
    """One cause: its sample, what it means, what the appliance does, what the owner should do."""
    lines = [f"### {cause.label}", "", f"{sentence_of(cause).rstrip('.')}.", "", "```", *map(_quoted, sample_of(cause)), "```"]
    lines += ["", f"**The appliance.** {_IF_GONE if cause.is_ok else _does(cause, TABLE[cause])}"]
    if remedies := remedies_of(cause):
        lines += ["", "**You.**", *(f"{number}. {text}" for number, text in enumerate(remedies, 1))]
    return [*lines, "", f"Known by: {', '.join(_patterns(cause)) or 'rules alone'}."]


def _does(cause: Cause, row: Row) -> str:
    if row.response not in (Response.SAFER, Response.SAME_THEN_SAFER):
        return _DOES[row.response]
    return f"{_DOES[row.response]}: {'; '.join(moves_against(cause))}. Of the fixed steps, the next that {row.better.words}."


def _quoted(item: Evidence) -> str:
    return f"{item.source.value:<12}{item.text.rstrip()}"


def _patterns(cause: Cause) -> list[str]:
    return [
        f"`{pattern.pattern_id}`"
        for pattern in load_catalogue().patterns
        if (pattern.cause is cause or pattern.event == cause.label) and pattern.kind in (Kind.CAUSE, Kind.BENIGN)
    ]


def _depth() -> list[str]:
    """How the root is told from what follows from it."""
    lines = ["## Depth", "", "The lower tier is the deeper cause.", "", "| tier | what |", "|---|---|"]
    lines += [f"| {tier} | {what} |" for tier, what in TIERS.items()]
    lines += ["", "## Named edges", "", "| cause | explains | why |", "|---|---|---|"]
    explained: dict[tuple[Cause, str], list[str]] = {}
    for (cause, effect), why in edges().items():
        explained.setdefault((cause, why), []).append(f"`{effect.label}`")
    return lines + [f"| `{cause.label}` | {', '.join(effects)} | {why} |" for (cause, why), effects in explained.items()]


if __name__ == "__main__":
    print(page(), end="")
