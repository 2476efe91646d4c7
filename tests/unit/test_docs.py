"""The documentation: builds without a warning, and names only verbs, options and keys that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from appliance.cli.__main__ import run
from appliance.cli.verbs import VERBS, appliancectl
from appliance.config.keys import keys_of
from appliance.config.reference import reference
from appliance.config.schema import tables
from appliance.metrics_page import page as metrics_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/man").glob("*.[578]")])
_COMMAND = re.compile(r"appliancectl ([^`\n|;#()<>]+)")
_KEY = re.compile(r"`(" + "|".join(tables()) + r")\.([a-z0-9_]+)")
_FILES = ("toml", "py", "json", "sock", "db", "service", "md")
"""`engine.py` is a file and no key."""


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """Every link, every anchor and every picture is there, and every page is in the contents."""
    pytest.importorskip("mkdocs", reason="NOT CHECKED: links of the documentation; pip install mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr


def test_the_configuration_reference_is_current() -> None:
    """A key that is new fails here, with the command that mends it."""
    committed = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert committed == reference(), "run: python -m appliance.config.reference > docs/configuration.md"


def test_the_metrics_reference_is_current() -> None:
    """Written from the definitions by which the gateway serves; that it serves them all, a scrape says (test_metrics.py)."""
    committed = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert committed == metrics_page(), "run: python -m appliance.metrics_page > docs/metrics.md"


def test_the_plan_that_the_guide_explains_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    """The budget of the 3090, printed by the command that stands over it."""
    text = (ROOT / "docs/budget-3090.md").read_text(encoding="utf-8")
    block = re.search(r"```console\n\$ appliancectl (.*?[^\\])\n(.*?)\n```", text, re.DOTALL)
    assert block is not None
    assert run(shlex.split(block[1].replace("\\\n", " "))) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    assert block[2].split("\n") == printed


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_the_links_outside_of_the_guide_lead_somewhere(page: Path) -> None:
    """mkdocs looks at docs/ alone; these name files of the repository."""
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands(text: str) -> Iterator[list[str]]:
    """Every `appliancectl ...` of a page, as words."""
    for match in _COMMAND.finditer(text.replace("\\-", "-").replace("\\\n", " ")):
        try:
            yield shlex.split(match[1].partition("&&")[0])
        except ValueError:  # a quotation that goes on in the next line
            yield match[1].split()


def fault_of(words: list[str]) -> str:
    """What of a command line there is not; empty where all of it is there."""
    command: click.Command = appliancectl
    context = click.Context(appliancectl)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            option = word.partition("=")[0].rstrip(".,:)")
            if option not in known and not command.context_settings.get("ignore_unknown_options"):
                return f"{command.name} has no {option}"
            parameter = next((each for each in command.params if option in each.opts), None)
            if isinstance(parameter, click.Option) and not parameter.is_flag and "=" not in word and words:
                words.pop(0)
        elif isinstance(command, click.Group):
            found = command.get_command(context, word.rstrip(".,:"))
            if found is None:
                return "" if not word.islower() or command is not appliancectl else f"no verb {word}"
            command = found
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    """Verbs and options, of every command line that a page shows."""
    faults = {" ".join(words): fault for words in commands(page.read_text(encoding="utf-8")) if (fault := fault_of(list(words)))}
    said = {
        command: fault for command, fault in faults.items() if command.split()[0] in VERBS or command.startswith("--") or "`" in command
    }
    assert said == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_of_a_page_are_there(page: Path) -> None:
    """Every `table.key`."""
    found = {(table, key) for table, key in _KEY.findall(page.read_text(encoding="utf-8")) if key not in _FILES}
    unknown = [f"{table}.{key}" for table, key in sorted(found) if key not in keys_of(tables()[table])]
    assert unknown == []


def test_a_wrong_command_would_be_found() -> None:
    """The check itself."""
    assert fault_of(["status", "--colour"]) == "status has no --colour"
    assert fault_of(["diagnose", "engine.log", "--exit", "137"]) == ""
    assert fault_of(["config", "check"]) == ""
