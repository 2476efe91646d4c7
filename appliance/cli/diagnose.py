"""`appliancectl diagnose`: the last incident of this box, or any logs of any box."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.cli import records
from appliance.cli.logs import Log, read_logs
from appliance.cli.place import Place
from appliance.cli.printing import bad, bold, good, moment, say, say_json, warn
from appliance.cli.verbs import Verb
from appliance.core.diagnosis import Diagnosis
from appliance.core.errors import ApplianceError, ExitCode
from appliance.core.evidence import Evidence, Source
from appliance.core.printable import printable
from appliance.core.units import parse_duration_s

if TYPE_CHECKING:
    from appliance.diagnosis.catalogue import Catalogue

ENGINES = ("sglang", "vllm", "llamacpp", "ollama", "tgi", "native", "custom")
_LOG = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


@dataclass(frozen=True, slots=True)
class Form:
    """How the verdict is told."""

    as_json: bool
    as_markdown: bool
    bundle: Path | None

    def __post_init__(self) -> None:
        if self.as_json and self.as_markdown:
            raise click.UsageError("--json and --markdown exclude each other")

    @property
    def as_text(self) -> bool:
        """For a person."""
        return not (self.as_json or self.as_markdown)


def _log_option(name: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", type=_LOG, multiple=True, metavar="FILE", help=f"{words}; may be repeated, - is stdin.")


@click.command(cls=Verb)
@click.argument("files", type=_LOG, nargs=-1, metavar="[FILE]...")
@_log_option("engine-log", "What the engine printed")
@_log_option("kernel-log", "dmesg or journalctl -k")
@_log_option("systemd-log", "journalctl -u of the unit")
@_log_option("smi", "Output of nvidia-smi")
@click.option("--exit", "exit_word", metavar="CODE|SIGNAL", help="How the process ended, such as 137, -9 or SIGKILL.")
@click.option("--stopped-by-us", is_flag=True, help="Somebody asked for the stop: its signals are no crash.")
@click.option("--engine", type=click.Choice(ENGINES, case_sensitive=False), help="Which engine wrote the log.")
@click.option("--since", metavar="TIME", help="Leave out what is older: 10min, 2h, or 2026-11-30T14:05.")
@click.option("--incident", "incident_id", metavar="ID", help="An incident of this box other than the last.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown to paste into an issue, without secrets.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.tar.zst",
    help="Also write report and evidence to a file, without tokens, keys, prompts, hosts and user names.",
)
@click.pass_obj
def diagnose(
    place: Place,
    files: tuple[Path, ...],
    engine_log: tuple[Path, ...],
    kernel_log: tuple[Path, ...],
    systemd_log: tuple[Path, ...],
    smi: tuple[Path, ...],
    exit_word: str | None,
    stopped_by_us: bool,
    engine: str | None,
    since: str | None,
    incident_id: str | None,
    as_json: bool,
    as_markdown: bool,
    bundle: Path | None,
) -> ExitCode:
    """Why it crashed: this box's last incident, or any log.

    Without FILE the last incident of this box, also while applianced is down. With FILE (- is stdin) any engine log,
    dmesg, journalctl or docker logs output, of any machine, compressed or not. Exit code 1 when something crashed,
    `unknown` included; 0 when nothing did.

    \b
    Examples:
      appliancectl diagnose
      appliancectl diagnose engine.log --kernel-log dmesg.txt --exit 137
      journalctl -u sglang -o json | appliancectl diagnose -
    """
    logs = [Log(path, source) for source, paths in _sources(files, engine_log, kernel_log, systemd_log, smi) for path in paths]
    form = Form(as_json, as_markdown, bundle)
    if not logs and exit_word is None:
        if stopped_by_us or engine or since:
            raise click.UsageError("--stopped-by-us, --engine and --since are about logs: name a FILE, or - for stdin")
        return _last_incident(place, incident_id or "", form)
    if incident_id is not None:
        raise click.UsageError("--incident is about this box; leave the files out")
    from appliance.diagnosis import diagnose as judge

    catalogue = _catalogue(place)
    evidence = [*read_logs(logs, _since_s(since), catalogue), *_exit(exit_word)]
    verdict = judge(evidence, stopped_by_us=stopped_by_us, engine=engine, catalogue=catalogue)
    return _tell(verdict, evidence, form)


def _catalogue(place: Place) -> Catalogue:
    """With the operator's own patterns. A configuration that cannot be read is no reason to leave a log unread."""
    from appliance.config.schema import DiagnosisTable
    from appliance.diagnosis import with_operator_patterns

    try:
        folder = place.load().config.diagnosis.patterns_dir
    except ApplianceError:
        folder = DiagnosisTable().patterns_dir
    catalogue, problems = with_operator_patterns(Path(folder) if folder else None)
    for problem in problems:
        warn(problem)
    return catalogue


def _sources(
    files: Sequence[Path], engine_log: Sequence[Path], kernel_log: Sequence[Path], systemd_log: Sequence[Path], smi: Sequence[Path]
) -> tuple[tuple[Source | None, Sequence[Path]], ...]:
    return (
        (None, files),
        (Source.ENGINE_LOG, engine_log),
        (Source.KERNEL_LOG, kernel_log),
        (Source.SYSTEMD, systemd_log),
        (Source.NVIDIA_SMI, smi),
    )


def _exit(word: str | None) -> list[Evidence]:
    from appliance.diagnosis import exit_evidence

    try:
        return [] if word is None else [exit_evidence(word)]
    except ValueError as error:
        raise click.UsageError(f"--exit {error}") from None


def _since_s(text: str | None) -> float | None:
    """Seconds since the epoch of "10min" (ago), or of a date and time, local where it names no zone."""
    if text is None:
        return None
    try:
        return time.time() - parse_duration_s(text)
    except ValueError:
        pass
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise click.UsageError(f"--since {text!r}: write how long ago, such as 10min, or a time such as 2026-11-30T14:05") from None


def _last_incident(place: Place, incident_id: str, form: Form) -> ExitCode:
    from appliance.control.codec import diagnosis_from_json, evidence_from_json

    incident = records.one(place, incident_id)
    if incident is None:
        if incident_id:
            raise ApplianceError(f"there is no incident {incident_id!r}", hint="`appliancectl incidents` lists them")
        say_json(None) if form.as_json else say("no incidents: nothing has crashed here")
        return ExitCode.OK
    verdict = diagnosis_from_json(incident["diagnosis"])
    if form.as_text:
        say(_headline(incident))
    return _tell(verdict, [evidence_from_json(item) for item in incident["evidence"]], form, incident)


def _headline(incident: records.Document) -> str:
    from appliance.diagnosis import incident_report

    what = f"{incident['engine']} {incident['engine_version']}".strip()
    load = f", {incident_report.counted(incident)} in flight" if incident["inflight"] else ""
    phase = incident_report.phase(incident)
    card = f" on card {incident['card']}" if incident.get("card") else ""
    return f"{incident['incident_id']}  {moment(incident['time_s'])}  {what} with {incident['model']}{card}, {phase}{load}\n"


def _tell(verdict: Diagnosis, evidence: Sequence[Evidence], form: Form, incident: records.Document | None = None) -> ExitCode:
    from appliance.cli import bundles

    try:
        if form.bundle is not None:  # first: whoever reads what is printed may stop reading (`| head`)
            bundles.write(form.bundle, verdict, evidence, incident)
    finally:
        _print(verdict, evidence, form, incident)
    return ExitCode.BAD if verdict.crashed else ExitCode.OK


def _print(verdict: Diagnosis, evidence: Sequence[Evidence], form: Form, incident: records.Document | None) -> None:
    from appliance.diagnosis import incident_report, report
    from appliance.diagnosis.dumps import found_in

    found = found_in(evidence)
    if form.as_json:
        say_json(report.to_json_dict(verdict, found) | ({} if incident is None else _incident_fields(incident)))
    elif form.as_markdown:
        say(printable(_markdown(verdict, found, incident).rstrip("\n"), keep="\n\t"))
    else:
        did = None if incident is None else incident_report.done(incident)
        _print_text(report.text(verdict, did=did, found=found), crashed=verdict.crashed)


def _markdown(verdict: Diagnosis, found: Sequence[str], incident: records.Document | None) -> str:
    """Without secrets, as it is for others to read. A log of somebody's has no head: nothing is known of its machine."""
    from appliance import __version__
    from appliance.diagnosis import incident_report, report
    from appliance.diagnosis.bundle import redacted
    from appliance.diagnosis.redact import Redactor

    redactor = Redactor()
    clean, told = redacted(verdict, redactor), [redactor.redact(item) for item in found]
    if incident is not None:
        return incident_report.markdown(incident, clean, redactor, told)
    return f"{report.markdown(clean, told)}\nDiagnosed by llm-appliance {__version__}.\n"


def _incident_fields(incident: records.Document) -> dict[str, object]:
    """What is known beyond the verdict; `action` is what was done, not what would be."""
    kept = ("incident_id", "time_s", "generation", "engine", "engine_version", "model", "phase", "uptime_s", "recovered_s")
    moves = ("rung_before", "rung_after", "inflight")
    action = incident["action"]
    return {
        "action": action["kind"],
        "basis": action["basis"],
        "card": incident.get("card", ""),
        **{name: incident[name] for name in (*kept, *moves)},
    }


def _print_text(text: str, *, crashed: bool) -> None:
    """Lines of a log of any machine are in it."""
    lines = printable(text, keep="\n\t").split("\n")
    for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
        if number == 0:
            say((bad if crashed else good)(line))
        elif line and not line.startswith(" ") and following.startswith("  "):
            say(bold(line))
        else:
            say(line)
