"""`appliancectl model add | list | remove`: the models of this box, under the names that the configuration can use."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from appliance.cli import hub, owner
from appliance.cli.models import MODELS
from appliance.cli.place import Place
from appliance.cli.printing import bold, faint, good, say, say_json, warn
from appliance.cli.setup import bring_demo, shown_state_dir, state_dir_of
from appliance.cli.verbs import VerbGroup
from appliance.core.errors import ApplianceError, ExitCode, ModelError
from appliance.core.plan import ModelFacts
from appliance.core.units import GIB, format_bytes

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_KEPT_FREE_BYTES = GIB
"""Of the disk, for incidents and logs."""


@click.group(cls=VerbGroup)
def model() -> None:
    """The models of this box: bring one, list them, take one away."""


@model.command()
@click.argument("source")
@click.option("--name", help="What it is called here [default: the folder's or the file's name].")
@click.option("--copy", is_flag=True, help="Copy its files; else they stay where they are and are linked to.")
@click.option("--convert", is_flag=True, help="With gguf: make the folder of it that the built-in engine serves.")
@click.option("--token-file", type=_FILE, help="With hf: file whose only line is the hub's token [default: HF_TOKEN, or `hf auth login`].")
@click.pass_obj
def add(place: Place, source: str, name: str | None, copy: bool, convert: bool, token_file: Path | None) -> ExitCode:
    """Check a model's files and put it among the models of this box.

    SOURCE is a model folder, gguf:FILE, hf:ORG/NAME[@revision], or demo. Headers and sizes are read, so that a download that was cut short
    is told of here. What is interrupted leaves nothing that looks like a model; one from a hub goes on where it was (HF_ENDPOINT names
    another hub).

    \b
    Examples:
      appliancectl model add /media/disk/Qwen3.8-27B --copy
      appliancectl model add demo
      appliancectl model add gguf:~/Downloads/model-Q4_K_M.gguf --name small
      appliancectl model add gguf:~/Downloads/model-Q8_0.gguf --convert
      appliancectl model add hf:Qwen/Qwen3-0.6B@main
    """
    state_dir = state_dir_of(place)
    if token_file is not None:
        os.environ["HF_TOKEN"] = hub.read_token(token_file)
    if (other := owner.other_owner(state_dir)) is not None:
        options = [*(["--name", name] if name else []), *(["--copy"] if copy else []), *(["--convert"] if convert else [])]
        return owner.again_as(other, state_dir, ["model", "add", source, *options])
    models = state_dir / MODELS
    path = Path(source.removeprefix("gguf:")).expanduser().absolute()
    if convert and not path.is_file():
        raise click.UsageError(f"--convert is for a GGUF file, and {source} is none")
    if source == "demo":
        return bring_demo(place, state_dir, models)
    if source.startswith("hf:"):
        _say_ready(_add_from_hub(place, state_dir, source, name), state_dir)
        return ExitCode.OK
    named = _name(name or path.name.removesuffix(".gguf"))
    if convert:
        return _convert(place, path, models, named, state_dir)
    target = _add(path, models, named, copy=copy)
    _say_added(place, target, state_dir)
    if not path.is_file():
        say(f'Serve it with model.path = "{target}" in appliance.toml')
        return ExitCode.OK
    say(f'Serve it with model.path = "{target}", and engine.backend = "llamacpp" in appliance.toml')
    if place.load().config.engine.backend == "native":
        say(f"For the built-in engine it has to be another form: `appliancectl model add {source} --name {named}-converted --convert`")
    return ExitCode.OK


def _convert(place: Place, file: Path, models: Path, name: str, state_dir: Path) -> ExitCode:
    from appliance.cli.engine_trials import converted

    target = _free(models, name)
    models.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not converted(file, models, name, state_dir):
        return ExitCode.BAD
    _say_added(place, target, state_dir)
    say(f'Serve it with model.path = "{target}" in appliance.toml')
    return ExitCode.OK


def _name(wanted: str) -> str:
    if not wanted or wanted.startswith(".") or "/" in wanted or not wanted.isprintable():
        raise click.UsageError(f"{wanted!r} cannot be the name of a model; give one with --name")
    return wanted


def _say_added(place: Place, folder: Path, state_dir: Path) -> None:
    """And what a start, or the first question, would show."""
    _warn_of_kind(place, folder, state_dir)
    _say_ready(folder, state_dir)


def _warn_of_kind(place: Place, folder: Path, state_dir: Path) -> None:
    """For another engine it is a model all the same."""
    from appliance.cli.engine_trials import trouble_with_kind

    if place.load().config.engine.backend == "native" and (trouble := trouble_with_kind(folder, state_dir)):
        warn(f"the built-in engine, which is configured, does not serve it: {trouble}")


def _say_ready(folder: Path, state_dir: Path) -> None:
    from appliance.cli.engine_trials import trouble_with_template

    if trouble := trouble_with_template(folder, state_dir):
        warn(f"its chat template does not render a plain question, chats will be refused: {trouble}")
    say(f"{good('ok')} {folder}")


def _add_from_hub(place: Place, state_dir: Path, source: str, name: str | None) -> Path:
    """Into a hidden folder of that commit, which an interrupted call leaves for the next one; then checked and renamed."""
    from appliance.cli.model_checks import checked_facts

    wanted = hub.named(source)
    named = _name(name or wanted.name)
    models = state_dir / MODELS
    target = _free(models, named)
    models.mkdir(mode=0o755, parents=True, exist_ok=True)

    def folder_of(commit: str) -> Path:
        mine = models / f".{named}.{commit[:12]}.hub"
        for other in models.glob(f".{glob.escape(named)}.*.hub"):
            if other != mine:  # of another commit: its files are others
                _forget(other)
        mine.mkdir(exist_ok=True)
        return mine

    python = hub.python_with_client(state_dir, place.load().config.engine.python)
    work = hub.fetched(wanted, folder_of, python, lambda folder: _warn_of_kind(place, folder, state_dir))
    facts = checked_facts(work)
    work.rename(target)
    say(f"{good('ok')} {_words_of(facts)}")
    return target


def _free(models: Path, name: str) -> Path:
    """Where a model of that name goes. Raises ModelError where there is one."""
    target = models / name
    if target.exists() or target.is_symlink():
        raise ModelError(f"there is a model {name!r} already", hint=f"give another --name, or: appliancectl model remove {name}")
    return target


def _words_of(facts: ModelFacts) -> str:
    size = format_bytes(facts.weight_bytes)
    return f"{facts.architecture or 'a model'}, {size} of weights, {_context(facts.max_context_tokens)}"


def _add(path: Path, models: Path, name: str, *, copy: bool) -> Path:
    """Under a hidden name first; then renamed, which is there whole or not at all."""
    from appliance.cli.model_checks import checked_facts

    facts = checked_facts(path)
    target = _free(models, name)
    models.mkdir(mode=0o755, parents=True, exist_ok=True)
    work = models / f".{name}.new"
    _forget(work)
    if not copy:
        if path.is_dir():
            work.symlink_to(path.resolve())
        else:
            work.mkdir()
            (work / path.name).symlink_to(path.resolve())
    else:
        _check_space(models, path)
        (shutil.copytree(path, work) if path.is_dir() else _copy_file(path, work))
    work.rename(target)
    say(f"{good('ok')} {_words_of(facts)}")
    return target


def _copy_file(file: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy2(file, folder / file.name)


def _check_space(models: Path, path: Path) -> None:
    needed = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())
    free = shutil.disk_usage(models).free
    if free < needed + _KEPT_FREE_BYTES:
        raise ApplianceError(
            f"not enough disk space in {models}: the model has {format_bytes(needed)}, {format_bytes(free)} are free and 1 GiB is kept so",
            hint="free some space, or leave --copy out",
        )


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def list_(place: Place, as_json: bool) -> None:
    """All of them; the one that is configured is marked.

    \b
    Example:
      appliancectl model list
    """
    models = shown_state_dir(place) / MODELS
    configured = place.load().config.model.path
    rows = [_row(folder, configured) for folder in _all(models)]
    if as_json:
        say_json({"models": [row.document() for row in rows]})
    for row in () if as_json else rows:
        say(f"{good('*') if row.configured else ' '} {bold(row.name)}  {row.words}  {faint(str(row.path))}")
    if not rows and not as_json:
        say(f"none in {models}: `appliancectl model add DIR`, or `appliancectl model add demo` for a small one")


@model.command()
@click.argument("name")
@click.pass_obj
def remove(place: Place, name: str) -> ExitCode:
    """Take one away: its files where they were copied, only the link where they were not.

    \b
    Example:
      appliancectl model remove small
    """
    state_dir = state_dir_of(place)
    found = {folder.name: folder for folder in _all(state_dir / MODELS)}
    if name not in found:
        raise ModelError(f"there is no model {name!r} in {state_dir / MODELS}", hint=f"there are: {', '.join(found) or 'none'}")
    if _row(found[name], place.load().config.model.path).configured:
        raise ModelError(f"{name} is the model that is configured (model.path)", hint="configure another first")
    if (other := owner.other_owner(state_dir)) is not None:
        return owner.again_as(other, state_dir, ["model", "remove", name])
    # Renamed first: what is interrupted is no model any more.
    gone = found[name].with_name(f".{name}.old")
    _forget(gone)
    found[name].rename(gone)
    _forget(gone)
    say(f"{good('ok')} {name} is gone")
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    path: Path
    words: str
    configured: bool
    linked: bool
    weight_bytes: int | None

    def document(self) -> dict[str, object]:
        """For --json."""
        return {
            "name": self.name, "path": str(self.path), "weight_bytes": self.weight_bytes, "configured": self.configured,
            "linked": self.linked, "detail": self.words,
        }  # fmt: skip


def _row(folder: Path, configured: str) -> _Row:
    from appliance.planner.model_files import model_facts

    served = Path(configured).resolve() if configured else None
    mine = served is not None and (served == folder.resolve() or served.parent == folder.resolve())
    linked = folder.is_symlink() or any(entry.is_symlink() for entry in folder.glob("*.gguf"))
    try:
        facts = model_facts(folder)
    except ApplianceError as error:
        return _Row(folder.name, folder, f"cannot be served: {error.message}", mine, linked, None)
    kind = f", {facts.quantisation}" if facts.quantisation else ""
    words = f"{format_bytes(facts.weight_bytes)}{kind}, {_context(facts.max_context_tokens)}{', linked' if linked else ''}"
    return _Row(folder.name, folder, words, mine, linked, facts.weight_bytes)


def _context(tokens: int) -> str:
    return f"a context of {tokens:,} tokens"


def _all(models: Path) -> Iterator[Path]:
    if models.is_dir():
        yield from sorted(entry for entry in models.iterdir() if not entry.name.startswith(".") and (entry.is_dir() or entry.is_symlink()))


def _forget(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
