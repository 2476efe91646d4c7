"""`python parse_with.py sglang|vllm FOLDER`: command lines (JSON lists on stdin), parsed by the argument parser of an unpacked wheel.

Only the engine's argument modules are the real ones. What else they import (CUDA, kernels, servers, the rest of the engine) is a ghost: a
module whose every name is a class that can be called, subclassed and subscripted, and does nothing.
Prints a JSON list: for each command line null, or what the parser said.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

USED = ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "regex", "yaml")
"""Installed modules that the parsers are built with."""


VLLM = (
    "vllm.engine.arg_utils", "vllm.config", "vllm.utils", "vllm.logger", "vllm.logging_utils", "vllm.envs",
    "vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args",
)  # fmt: skip
SGLANG = ("sglang.srt.server_args", "sglang.srt.arg_groups", "sglang.srt.environ", "sglang.srt.model_executor.cuda_graph_config")
"""Modules that are the real ones."""


class _Meta(type):
    """Of a class that takes whatever is done with it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ghost(name)

    def __getitem__(cls, _item: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is _Meta or type(type(instance)) is _Meta

    def __or__(cls, _other: object) -> Any:
        return cls

    __ror__ = __or__

    def __add__(cls, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        return super().__call__(*args, **kwargs)


def ghost(name: str) -> Any:
    """A class of that name."""

    def nothing(self: object, *_args: object, **_kwargs: object) -> None:
        """Takes whatever it is made with."""

    def called(self: Any, *args: Any, **_kwargs: object) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else ghost(name)

    def attribute(self: Any, wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return ghost(wanted)

    order = dict.fromkeys(("__lt__", "__gt__", "__ge__", "__le__"), lambda _self, _other: False)
    body = {"__init__": nothing, "__call__": called, "__getattr__": attribute, "__iter__": lambda _self: iter(()), **order}
    return _Meta(name, (), {**body, "__get_pydantic_core_schema__": classmethod(_anything)})


def _anything(_cls: object, _source: object, _handler: object) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class GhostModule(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = ghost(name)
        setattr(self, name, value)
        return value


class Ghosts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Everything but the standard library and the real modules of one package."""

    def __init__(self, package: str, folder: str, real: Sequence[str]) -> None:
        self._package = package
        self._folder = Path(folder)
        self._real = tuple(real)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or top in USED or fullname.startswith(self._real):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = GhostModule(spec.name)
        module.__path__ = [str(self._folder.joinpath(*spec.name.split(".")))]  # real modules below a ghost are found there
        module.__version__ = "99.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It is what it is."""


def haunt(package: str, folder: str, real: Sequence[str]) -> None:
    """From here on, imports of `package` come from the folder, and all but `real` of it is a ghost."""
    sys.path.insert(0, folder)
    sys.meta_path.insert(0, Ghosts(package, folder, real))


def sglang_parser(folder: str) -> Callable[[list[str]], object]:
    """`python -m sglang.launch_server`'s."""
    import argparse

    haunt("sglang", folder, SGLANG)
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found,unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args


def vllm_parser(folder: str) -> Callable[[list[str]], object]:
    """`vllm serve`'s."""
    haunt("vllm", folder, VLLM)
    make_arg_parser = _first("make_arg_parser", *(f"vllm.entrypoints.{place}.cli_args" for place in ("common", "launchers", "openai")))
    parser = _first("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils")
    return make_arg_parser(parser()).parse_args  # type: ignore[no-any-return]


def _first(name: str, *modules: str) -> Any:
    """From the first of these modules that there is: they moved from version to version."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def verdict(parse: Callable[[list[str]], object], arguments: list[str]) -> str | None:
    """None when it is accepted."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse(arguments)
    except SystemExit as ended:
        return f"exit code {ended.code}: {said.getvalue()[-400:]}"
    return None


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    parse = {"sglang": sglang_parser, "vllm": vllm_parser}[sys.argv[1]](sys.argv[2])
    print(json.dumps([verdict(parse, arguments) for arguments in asked]))
