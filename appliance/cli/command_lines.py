"""How people start engines: by hand, in a unit, in a container. Pure: words in, the engine's own words and its environment out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from appliance.core.errors import ApplianceError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_DOCKER_WITH_WORD = frozenset(
    (
        *("-e", "--env", "-v", "--volume", "-p", "--publish", "--gpus", "--name", "--shm-size", "--ipc", "--network", "--net", "--restart"),
        *("--env-file", "--device", "-w", "--workdir", "--entrypoint", "--runtime", "--ulimit", "-u", "--user", "--mount", "--platform"),
        *("--hostname", "-h", "-m", "--memory", "--cpus", "--label", "-l", "--log-driver", "--log-opt", "--security-opt", "--cap-add"),
        *("--group-add", "--pid", "--pull"),
    )
)
_IMAGES = {"sglang": "sglang.launch_server", "vllm": "vllm serve", "llama.cpp": "llama-server"}
"""What an image's name contains → what its entry point runs, where the command is options alone."""
_SYSTEMDS_OWN = frozenset({"ExecStart", "Environment"})
_WRAPPERS = frozenset({"sudo", "env", "exec", "nohup", "nice", "ionice", "numactl", "taskset"})


@dataclass(frozen=True, slots=True)
class Started:
    """One engine's command line.

    Attributes:
        environment: NAME=VALUE each.
        volumes: folder in the container → folder of this machine.
        port: of this machine, where a container's is published.
        dropped: what belonged to the way it was started, a sentence each.
    """

    words: tuple[str, ...]
    environment: tuple[str, ...] = ()
    volumes: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    dropped: tuple[str, ...] = ()

    def outside(self, path: str) -> str:
        """A path in the container as it is called on this machine."""
        for inside, outside in sorted(self.volumes.items(), key=lambda pair: -len(pair[0])):
            if path == inside or path.startswith(f"{inside.rstrip('/')}/"):
                return outside.rstrip("/") + path[len(inside.rstrip("/")) :]
        return path


def from_words(words: Sequence[str]) -> Started:
    """A command line, perhaps of docker or podman. Raises ApplianceError where there is none."""
    rest, environment = list(words), list[str]()
    while rest and (_ASSIGNMENT.match(rest[0]) or rest[0] in _WRAPPERS):
        word = rest.pop(0)
        if word not in _WRAPPERS:
            environment.append(word)
    if not rest:
        raise ApplianceError("there is no command line", hint="write it behind --, such as: appliancectl import -- vllm serve MODEL")
    if rest[0].rpartition("/")[2] in ("docker", "podman") and "run" in rest:
        started = _from_container(rest[rest.index("run") + 1 :])
        return replace(started, environment=(*environment, *started.environment))
    return Started(tuple(rest), tuple(environment))


def from_unit(text: str) -> Started:
    """A unit of systemd. Raises ApplianceError where it starts nothing."""
    lines = [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines()]
    pairs = [line.partition("=")[::2] for line in lines if "=" in line and not line.startswith(("#", ";", "["))]
    starts = [value for name, value in pairs if name.strip() == "ExecStart" and value.strip()]
    if not starts:
        raise ApplianceError("the unit has no ExecStart=", hint="name the .service file that starts the engine")
    environment = [word for name, value in pairs if name.strip() == "Environment" for word in _split(value)]
    started = from_words(_split(starts[-1].lstrip("@-:+! ")))
    files = tuple(
        f"{name.strip()}={value.strip()}: put what it sets into engine.environment" for name, value in pairs if name == "EnvironmentFile"
    )
    return replace(started, environment=(*environment, *started.environment), dropped=(*started.dropped, *files))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ApplianceError(f"{text[:80]!r} cannot be read as words: {error}", hint="close the quotation") from None


def _from_container(words: list[str]) -> Started:
    environment, volumes, dropped, port = list[str](), dict[str, str](), list[str](), None
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option in _DOCKER_WITH_WORD and not value and words:
            value = words.pop(0)
        if option in ("-e", "--env"):
            environment.append(value)
        elif option in ("-v", "--volume") and ":" in value:
            outside, inside = value.split(":")[:2]
            volumes[inside] = outside
        elif option in ("-p", "--publish") and (found := re.fullmatch(r"(?:[\d.]+:)?(\d+):\d+", value)):
            port = int(found[1])
        else:
            dropped.append(f"{' '.join(filter(None, (option, value)))}: there is no container")
    if not words:
        raise ApplianceError("the container has no image", hint="write the whole `docker run ...`")
    image, *command = words
    return Started(tuple(_entry(image, command)), tuple(environment), volumes, port, tuple(dropped))


def _entry(image: str, command: list[str]) -> list[str]:
    """With the program that the image would start."""
    program = next((program for name, program in _IMAGES.items() if name in image), "")
    alone = (
        not command or command[0].startswith("-") or (program == "vllm serve" and not command[0].endswith(("python", "python3", "vllm")))
    )
    return [*program.split(), *command] if program and alone else command
