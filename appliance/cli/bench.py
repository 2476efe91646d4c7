"""`appliancectl bench`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.config import set_option
from appliance.cli.gateway_address import gateway_url, key_in
from appliance.cli.place import Place, serving_state_dir
from appliance.cli.printing import faint, fields, say, say_json, table
from appliance.cli.quantities import FiniteRange
from appliance.cli.verbs import Verb
from appliance.core.errors import ApplianceError, ExitCode
from appliance.core.units import parse_duration_s

if TYPE_CHECKING:
    from appliance.cli.load import Outcome, Shape, Target
    from appliance.traffic import Profile

DAY_S = 86400.0


@click.command(cls=Verb)
@click.option("--url", help="Where to send the requests [default: the gateway, as configured].")
@click.option("--model", default="", help="The model to ask for [default: the first that is served].")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File whose only line is an API key.")
@click.option("--requests", type=click.IntRange(1, 100_000), default=50, show_default=True, help="How many.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="How many at once.")
@click.option("--prompt-tokens", type=click.IntRange(1, 10_000_000), default=256, show_default=True, help="Length of the prompts.")
@click.option("--answer-tokens", type=click.IntRange(1, 10_000_000), default=64, show_default=True, help="Length of the answers.")
@click.option(
    "--from-traffic",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[7d]",
    help="Lengths, concurrency and shared beginnings as this box has seen them, in the last 7d or so.",
)
@click.option("--days", type=FiniteRange(0.01, 3650), default=30.0, show_default=True, help="With --from-traffic: of the last so many.")
@click.option("--keep-time", is_flag=True, help="With --from-traffic: wait between requests as long as clients did.")
@click.option("--timeout", "timeout_s", type=FiniteRange(1, 86400), default=600.0, show_default=True, help="Seconds without a byte.")
@click.option("--seed", type=int, default=1, show_default=True, help="For what is drawn by chance: the same seed, the same requests.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="An engine or a runtime that is started for this; several are compared. MODEL: where it serves another file.",
)
@click.option("--yes", is_flag=True, help="With --engine: drain the appliance that serves here while engines are compared.")
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def bench(place: Place, /, **options: Any) -> ExitCode:
    """Send requests, and say how fast they are answered.

    With --from-traffic the requests have the shape of the traffic that the gateway has recorded: pairs of lengths, how many others
    were under way, how much of the prompts was shared. Their words are drawn by chance; no text of a client is kept anywhere.

    With --engine the same requests go to each engine in turn, each started for it with this configuration, and the numbers say which one to
    take.

    Exit code 1 when a request failed.

    \b
    Example:
      appliancectl bench --requests 100 --concurrency 8 --prompt-tokens 2000
      appliancectl bench --from-traffic 7d --json
      appliancectl bench --engine native --engine llamacpp=/srv/models/small.gguf --from-traffic 7d
    """
    draw = random.Random(options["seed"])
    shapes = _recorded(place, draw, options) if options["from_traffic"] is not None else _uniform(options)
    if options["engines"]:
        return _compare(place, shapes, options)
    target, found = _measured(options["url"] or gateway_url(place), shapes, options)
    if options["as_json"]:
        say_json({"url": target.url, "model": target.model, **found})
    else:
        _print(target, shapes, found)
    return ExitCode.BAD if found["failed"] else ExitCode.OK


def _measured(url: str, shapes: Sequence[Shape], options: Mapping[str, Any]) -> tuple[Target, dict[str, Any]]:
    """All requests sent there, and their figures."""
    from appliance.cli.load import Replay, Target

    target = Target(url, options["model"], key_in(options["api_key_file"]), options["timeout_s"])
    target.calibrate()
    began_s = time.monotonic()
    with click.progressbar(length=len(shapes), label="requests", file=sys.stderr) as bar:
        sent = Replay(target, keeps_time=options["keep_time"], seed=options["seed"], done=lambda: bar.update(1))
        outcomes = sent.run(shapes)
    return target, _figures(outcomes, time.monotonic() - began_s)


def _compare(place: Place, shapes: Sequence[Shape], options: Mapping[str, Any]) -> ExitCode:
    """Engine after engine. One that does not come to serve is a result too."""
    from appliance.cli import contenders

    if options["url"] or options["model"] or options["api_key_file"]:
        raise click.UsageError("--engine starts what it measures: --url, --model and --api-key-file are for one that serves")
    config = place.load(options["assignments"]).config
    state_dir = serving_state_dir(place)
    ones = [contenders.contender(words, config, state_dir) for words in options["engines"]]
    deadline_s = config.supervisor.start_deadline_s
    results: list[dict[str, Any]] = []
    with contenders.box_out_of_the_way(place, agreed=options["yes"], deadline_s=config.gateway.drain_s + config.supervisor.stop_deadline_s):
        for one in ones:
            click.echo(f"{one.name}: starting", err=True)
            try:
                with contenders.serving(one, place, options["assignments"], deadline_s) as turn:
                    target, found = _measured(turn.url, shapes, options)
                    about = {"ready_s": round(turn.ready_s, 2), "restarts": turn.restarts()}
                    results.append({"engine": one.name, "model": target.model, **about, **found})
            except ApplianceError as error:
                results.append({"engine": one.name, "model": one.model, "error": error.message})
    best, why = contenders.recommended(results)
    if options["as_json"]:
        say_json({"requests": len(shapes), "results": results, "recommended": best, "reason": why})
    else:
        _print_comparison(results, why)
    return ExitCode.OK if best else ExitCode.BAD


def _print_comparison(results: Sequence[Mapping[str, Any]], why: str) -> None:
    head = ("engine", "tokens/s", "requests/s", "first token P50", "P95", "between P50", "answer P95", "failed", "restarts", "ready after")
    rows = []
    for one in results:
        if "error" in one:
            rows.append((str(one["engine"]), *["-"] * (len(head) - 2), str(one["error"])))
            continue
        first, between, whole = one["time_to_first_token_s"], one["inter_token_s"], one["request_s"]
        times = (first.get("p50", 0), first.get("p95", 0), between.get("p50", 0), whole.get("p95", 0))
        speed = f"{one['answer_tokens_per_s']:.1f}", f"{one['requests_per_s']:.2f}"
        ends = str(one["failed"]), str(one["restarts"]), f"{one['ready_s']:.1f} s"
        rows.append((str(one["engine"]), *speed, *(f"{value:.3f} s" for value in times), *ends))
    table(head, rows)
    say(f"Take {why}" if results else why)
    for one in results:
        for error, count in one.get("errors", {}).items():
            say(faint(f"{one['engine']}: {count} times: {error}"))


def _uniform(options: Mapping[str, Any]) -> list[Shape]:
    from appliance.cli.load import Shape

    shape = Shape(options["prompt_tokens"], options["answer_tokens"], beside=options["concurrency"] - 1)
    return [shape] * int(options["requests"])


def _recorded(place: Place, draw: random.Random, options: Mapping[str, Any]) -> list[Shape]:
    """Drawn from the traffic profile. Raises ApplianceError where there is none."""
    from appliance.traffic import read_profile

    try:
        days = parse_duration_s(options["from_traffic"]) / DAY_S if options["from_traffic"] else options["days"]
    except ValueError as error:
        raise click.UsageError(f"--from-traffic: {error}") from None
    profile = read_profile(serving_state_dir(place), time.time() - days * DAY_S)
    if not profile.requests:
        raise ApplianceError(f"no request was answered in the last {days:g} days", hint="look further back, such as --from-traffic 90d")
    return shapes_of(profile, int(options["requests"]), draw)


def shapes_of(profile: Profile, count: int, draw: random.Random) -> list[Shape]:
    """So many requests as the profile has them. Within a bucket, lengths are drawn evenly."""
    from appliance.cli.load import Shape
    from appliance.traffic import bound_of

    def within(bucket: int) -> float:
        return draw.uniform(bound_of(bucket), bound_of(bucket + 1))

    def drawn(counts: Mapping[int, int]) -> float:
        return within(draw.choices(list(counts), list(counts.values()))[0]) if counts else 0.0

    pairs = draw.choices(list(profile.lengths), list(profile.lengths.values()), k=count)
    return [
        Shape(
            prompt_tokens=max(1, int(within(prompt))),
            answer_tokens=max(1, int(within(answer))),
            shared=min(1.0, drawn(profile.cached_percent) / 100),
            beside=int(drawn(profile.concurrency)),
            gap_s=drawn(profile.gap_ms) / 1000,
        )
        for prompt, answer in pairs
    ]


def _figures(outcomes: Sequence[Outcome], took_s: float) -> dict[str, Any]:
    answered = [outcome for outcome in outcomes if not outcome.error]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    tokens_in, tokens_out = sum(one.prompt_tokens for one in answered), sum(one.answer_tokens for one in answered)
    return {
        "requests": len(outcomes),
        "failed": len(errors),
        "errors": {error: errors.count(error) for error in sorted(set(errors), key=errors.count, reverse=True)[:5]},
        "took_s": round(took_s, 3),
        "prompt_tokens": tokens_in,
        "cached_tokens": sum(one.cached_tokens for one in answered),
        "answer_tokens": tokens_out,
        "answer_tokens_per_s": round(tokens_out / took_s, 2) if took_s else 0.0,
        "requests_per_s": round(len(answered) / took_s, 3) if took_s else 0.0,
        "time_to_first_token_s": _spread([one.first_s for one in answered]),
        "inter_token_s": _spread([one.between_s for one in answered if one.between_s]),
        "request_s": _spread([one.whole_s for one in answered]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 4) for share in (50, 95, 99) if ordered}


def _print(target: Target, shapes: Sequence[Shape], found: Mapping[str, Any]) -> None:
    say(f"{target.model} at {target.url}")
    lengths = f"{min(one.prompt_tokens for one in shapes)} to {max(one.prompt_tokens for one in shapes)} tokens of prompt"
    fields(
        (
            ("requests", f"{found['requests']}, {found['failed']} failed, in {found['took_s']:.1f} s ({lengths})"),
            ("tokens", f"{found['prompt_tokens']} in ({found['cached_tokens']} from a cache), {found['answer_tokens']} out"),
            ("throughput", f"{found['answer_tokens_per_s']:.1f} tokens/s, {found['requests_per_s']:.2f} requests/s"),
        )
    )
    names = (("first token", "time_to_first_token_s"), ("between tokens", "inter_token_s"), ("whole answer", "request_s"))
    rows = [(name, *(f"{found[key].get(f'p{share}', 0):.3f} s" for share in (50, 95, 99))) for name, key in names]
    table(("", "P50", "P95", "P99"), rows)
    for error, count in found["errors"].items():
        say(faint(f"{count} times: {error}"))
