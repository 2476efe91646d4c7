"""`python -m appliance.engine`: the command line of one engine life. appliance/backends/native.py writes it."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from appliance.core.errors import ApplianceError
from appliance.core.launch import Endpoint
from appliance.engine.settings import DEVICES, FAULTS, WEIGHTS_DTYPES, EngineSettings

if TYPE_CHECKING:
    from appliance.engine.spare import Prepared

_EXIT_LISTEN = 1
_EXIT_DEFECT = 70
"""EX_SOFTWARE of sysexits.h, as when the engine loop fails."""

_LINE = "[%(asctime)s] %(levelname)s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"

log = logging.getLogger("appliance.engine")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, checked; a mistake ends the process with code 2 and a sentence."""
    parser = argparse.ArgumentParser(prog="python -m appliance.engine", description="Serve one model over HTTP.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder with config.json, *.safetensors, tokenizer.json")
    parser.add_argument("--name", default="", help="the id that clients use (default: the folder's name)")
    address = parser.add_mutually_exclusive_group(required=True)
    address.add_argument("--socket", metavar="PATH", help="listen on this unix socket")
    address.add_argument("--port", type=_number(int, 0, 65535), metavar="N", help="listen on 127.0.0.1; 0 lets the kernel choose")
    address.add_argument("--spare", action="store_true", help="load, and wait on standard input to be told what engine this is")
    settings = EngineSettings(Path())
    for name, minimum, default, doc in (
        ("threads", 0, settings.threads, "CPU threads; 0: one a core"),
        ("context-length", 0, settings.context_length_tokens, "tokens of prompt plus answer; 0: the model's own limit"),
        ("prefill-chunk", 1, settings.prefill_chunk_tokens, "tokens of one prefill step"),
        ("max-running", 1, settings.max_running, "sequences decoded together"),
        ("block-tokens", 1, settings.block_tokens, "tokens of one KV block"),
        ("kv-pool-bytes", 1, settings.kv_pool_bytes, "size of the KV cache"),
        ("swap-bytes", 0, settings.swap_bytes, "memory for answers that gave way to older ones; beyond it they are computed again"),
        ("max-body-bytes", 1, 32 * 1024**2, "larger request bodies get 413"),
    ):
        parser.add_argument(f"--{name}", type=_number(int, minimum), default=default, metavar="N", help=f"{doc} (default: {default})")
    for name, least, most, default_number, doc in (
        ("prefill-fraction", 0.05, 0.95, settings.prefill_fraction, "share of the KV cache that holds prompts"),
        ("write-timeout", 0.1, 3600.0, 120.0, "seconds that a client may take no bytes before its connection is closed"),
    ):
        number = _number(float, least, most)
        parser.add_argument(f"--{name}", type=number, default=default_number, metavar="F", help=f"{doc} (default: {default_number})")
    parser.add_argument("--device", choices=DEVICES, default=settings.device, help=f"where to compute (default: {settings.device})")
    parser.add_argument(
        "--weights-dtype",
        choices=WEIGHTS_DTYPES,
        default=settings.weights_dtype,
        help=f"of the weights in memory (default: {settings.weights_dtype})",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    parser.add_argument("--weight-holder", default="", metavar="SOCKET", help="of the process that holds the weights; they are checked")
    parser.add_argument("--fault", type=_fault, metavar="KIND@STEP", help=argparse.SUPPRESS)  # engine/faults.py; for tests
    return parser.parse_args(arguments)


def _fault(text: str) -> tuple[str, int]:
    kind, _, step = text.partition("@")
    if kind not in FAULTS or not step.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND@STEP with a KIND of {', '.join(FAULTS)}")
    return kind, int(step)


def _number(kind: type[int] | type[float], minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    """An argparse type with limits."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not (minimum <= value and (maximum is None or value <= maximum)):  # so put, NaN is out of range too
            limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: {limits}")
        return value

    return read


def settings_of(arguments: argparse.Namespace) -> EngineSettings:
    """The engine's part of the command line."""
    return EngineSettings(
        model_path=arguments.model,
        model_name=arguments.name,
        threads=arguments.threads,
        context_length_tokens=arguments.context_length,
        prefill_chunk_tokens=arguments.prefill_chunk,
        max_running=arguments.max_running,
        block_tokens=arguments.block_tokens,
        kv_pool_bytes=arguments.kv_pool_bytes,
        prefill_fraction=arguments.prefill_fraction,
        prefix_cache=not arguments.no_prefix_cache,
        device=arguments.device,
        weights_dtype=arguments.weights_dtype,
        swap_bytes=arguments.swap_bytes,
        weight_holder=arguments.weight_holder,
        fault=arguments.fault,
    )


def configure_evidence() -> None:
    """Everything that this process has to say goes to stderr, in the dialect that docs/structures.md describes.

    Native crashes and SIGABRT print every thread's Python stack: a hung engine is asked for its stacks that way. SIGQUIT
    prints the main thread's alone and then still kills, as everywhere: reading the frames of a thread that computes ends
    in a segmentation fault once in two hundred times (measured under load), and what died of SIGSEGV was not told to quit.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=_LINE, datefmt=_TIME)
    # A supervisor that died closes our stderr; that is no reason to print tracebacks about it into the same pipe.
    logging.raiseExceptions = False
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=False, chain=True)


async def serve(arguments: argparse.Namespace, prepared: Prepared | None = None) -> int:
    """One engine life; returns its exit code.

    Args:
        prepared: by a spare that this process was until now.

    Raises:
        ListenError: the address is in use.
    """
    # Imported here so that --help and a mistyped option cost nothing.
    from appliance.engine.api.service import LoadedModel, Service
    from appliance.engine.listen import listen
    from appliance.engine.server import EngineServer

    settings = settings_of(arguments)

    def load() -> LoadedModel:
        # The text side first: a bad model folder is found out before the seconds that importing torch takes.
        from appliance.engine.text import ModelText

        text = prepared.text if prepared is not None else ModelText(settings.model_path)
        from appliance.engine.build import build_engine

        return LoadedModel(build_engine(settings, prepared.usable_decoder() if prepared is not None else None), text)

    listener = listen(Endpoint(socket_path=arguments.socket, port=arguments.port))
    try:
        return await EngineServer(Service(arguments.max_body_bytes), load, arguments.write_timeout).run(listener)
    finally:
        if arguments.socket is not None:
            Path(arguments.socket).unlink(missing_ok=True)


def run_life(life: Coroutine[Any, Any, int]) -> NoReturn:
    """Run one engine life on an event loop of its own and exit the process with its code."""
    code = _EXIT_DEFECT
    try:
        code = asyncio.new_event_loop().run_until_complete(life)
    except ApplianceError as error:
        log.error("%s", error)
        code = _EXIT_LISTEN
    except Exception:
        log.exception("The engine failed in a way that nobody foresaw; please report this")
    logging.shutdown()
    # Without finalising the interpreter: that would wait for a load in progress, or pull it from under a thread in torch.
    os._exit(code)


def main() -> NoReturn:
    """The process."""
    arguments = parse_arguments(sys.argv[1:])
    configure_evidence()
    # One prompt is one string: threads of the tokenizer would only compete with the model's.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    prepared = None
    if arguments.spare:
        from appliance.engine.spare import stand_by

        told, prepared = stand_by(settings_of(arguments))
        arguments = parse_arguments(told)
    run_life(serve(arguments, prepared))


if __name__ == "__main__":
    main()
