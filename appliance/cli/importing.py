"""`appliancectl import`: from the way an engine was started before, to a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from appliance.cli.command_lines import Started, from_unit, from_words
from appliance.cli.printing import say, say_json
from appliance.cli.verbs import Verb
from appliance.core.errors import ApplianceError

_KNOWN = "SGLang (sglang.launch_server), vLLM (vllm serve) and llama.cpp (llama-server)"
_OLLAMA = 'Ollama keeps its models as GGUF files: `ollama show --modelfile MODEL` names the file, and engine.backend = "llamacpp" serves it'
_RUN_BY_HAND = ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@click.command(name="import", cls=Verb, context_settings={"ignore_unknown_options": True})
@click.option("--unit", type=click.Path(path_type=Path), metavar="FILE", help="A unit of systemd that starts the engine; as `unit FILE`.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[unit FILE | -- COMMAND...]")
def import_(unit: Path | None, as_json: bool, words: Sequence[str]) -> None:
    """The command line of an engine as a configuration.

    Of SGLang, vLLM or llama.cpp, started by hand, by docker or podman, or by a unit. Prints a file for conf.d: what has a key, what goes
    to engine.extra_args, and, as comments, what was dropped and why. Nothing is started or changed.

    \b
    Example:
      appliancectl import -- vllm serve /srv/models/Qwen3-8B --max-model-len 32k
      appliancectl import unit /etc/systemd/system/sglang.service
      appliancectl import -- docker run --gpus all -v /srv:/m vllm/vllm-openai --model /m/Qwen3-8B
    """
    if unit is None and len(words) == 2 and words[0] == "unit":
        unit, words = Path(words[1]), ()
    if (unit is None) == (not words):
        raise click.UsageError("name either unit FILE or a command line behind --")
    started = from_unit(_text_of(unit)) if unit is not None else from_words(words)
    settings, dropped, notes = _imported(started)
    if as_json:
        say_json({"settings": settings, "dropped": dropped, "notes": notes})
    else:
        say("\n".join(_toml(settings, dropped, notes)))


def _text_of(unit: Path) -> str:
    try:
        return unit.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.UsageError(f"the unit {unit} cannot be read: {error.strerror}") from None


globals()["import"] = import_  # verbs are found by their names, and this one is a word of Python's


def _imported(started: Started) -> tuple[dict[str, object], list[str], list[str]]:
    from appliance.flags.imported import engine_of, imported

    found = engine_of(started.words)
    if found is None:
        named = " ".join(started.words[:3])
        hint = _OLLAMA if "ollama" in named else f"what can be read are {_KNOWN}"
        raise ApplianceError(f"{named!r} starts no engine that is known here", hint=hint)
    engine, begin = found
    result = imported(engine, started.words[begin:])
    settings: dict[str, object] = dict(result.settings)
    if isinstance(path := settings.get("model.path"), str):
        settings["model.path"] = started.outside(path)
    if started.port is not None:
        settings["gateway.port"] = started.port
    program = started.words[0]
    if not started.volumes and program.startswith("/"):
        settings |= {"engine.program": program} if engine == "llamacpp" else {"engine.python": program} if "python" in program else {}
    elif engine != "llamacpp":
        result.notes.append("engine.python: the interpreter of an environment with the engine has to be named")
    kept = [word for word in started.environment if word.partition("=")[0] not in _RUN_BY_HAND]
    if kept:
        settings["engine.environment"] = tuple(kept)
    gone = [f"{word.partition('=')[0]}: not needed, or set by the appliance" for word in started.environment if word not in kept]
    return settings, [*result.dropped, *gone, *started.dropped], result.notes


def _toml(settings: dict[str, object], dropped: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    from appliance.config.annotate import toml_value
    from appliance.config.keys import facts_of, keys_of
    from appliance.config.schema import tables

    yield "# Made by `appliancectl import`. Look through it, put it into conf.d, then: appliancectl config check"
    yield from (f"# look: {note}" for note in notes)
    yield from (f"# dropped: {words}" for words in dropped)
    for table, kind in tables().items():
        of_table = {name.partition(".")[2]: value for name, value in settings.items() if name.partition(".")[0] == table}
        if of_table:
            yield from ("", f"[{table}]")
        for name, value in of_table.items():
            yield f"{name} = {toml_value(value, facts_of(keys_of(kind)[name]))}"
