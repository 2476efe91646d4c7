"""setup.cfg lists what the tree holds: a package that is forgotten there works in a checkout and is missing once installed."""

import configparser
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _config() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def test_every_package_of_the_tree_is_listed() -> None:
    """Nothing missing, nothing that is not there."""
    listed = set(_config()["options"]["packages"].split())
    found = set()
    for folder, name in (("appliance", "appliance"), ("kernels", "appliance_kernels")):
        for module in (ROOT / folder).rglob("*.py"):
            below = module.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *below)))
    namespaces = {package for package in listed if not _has_python(package)}
    assert found - listed == set()
    assert listed - found == namespaces
    assert all(any(_folder(package).glob("*.*")) for package in namespaces), "an empty package is listed"


def test_every_data_file_is_listed() -> None:
    """Patterns and remedies are data: without them the installed program diagnoses nothing."""
    data = {package: patterns.split() for package, patterns in _config()["options.package_data"].items()}
    for file in (ROOT / "appliance").rglob("*.toml"):
        package = ".".join(file.parent.relative_to(ROOT).parts)
        assert any(file.match(pattern) for pattern in data.get(package, [])), f"{file.relative_to(ROOT)} would not be installed"


def test_a_page_that_the_installed_files_name_is_in_the_package() -> None:
    """Whoever reads appliance.toml or a manual page on a machine with the package finds what they point to."""
    files = [ROOT / "etc/appliance.toml", *(ROOT / "docs/man").glob("*.[1-8]")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files).replace("\\-", "-")
    cited = set(re.findall(r"/usr/share/doc/llm-appliance/([\w.-]+\.md)", text))
    assert len(cited) > 2
    assert [name for name in sorted(cited) if not (ROOT / "docs" / name).is_file()] == []
    assert re.findall(r"(?<![\w/])docs/[\w-]+\.md", text) == [], "a path of the checkout"
    assert "docs/*.md" in (ROOT / "packaging/debian/llm-appliance.docs").read_text(encoding="utf-8").splitlines()


def _folder(package: str) -> Path:
    top, *below = package.split(".")
    return ROOT.joinpath({"appliance": "appliance", "appliance_kernels": "kernels"}[top], *below)


def _has_python(package: str) -> bool:
    return any(_folder(package).glob("*.py"))


def test_make_run_installs_what_serving_needs_and_make_test_the_rest(tmp_path: Path) -> None:
    """Whoever only wants to see it serve does not wait for transformers and linters."""

    def installs(target: str) -> list[str]:
        said = subprocess.run(["make", "-n", target, f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return re.findall(r"pip install --editable '(.+)'", said)

    assert installs("run") == [".[engine]"]
    assert installs("test")[-1] == ".[engine,test]"
