"""A card that is none: tensors that are put on it lie in the host's memory, and are kept apart from the host's as CUDA keeps them.

Whatever mixes the two, or hands a kernel one of the host's, fails as it would on a card; kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

CARD = torch.device("cuda", 0)
HOST = torch.device("cpu")
_CROSSES = (Tensor.copy_, Tensor.to, Tensor.cpu)
_INDEXES = (Tensor.__getitem__, Tensor.__setitem__)


class WrongDevice(AssertionError):
    """What CUDA would refuse."""


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class PretendCard(TorchFunctionMode):
    """While it is entered, `CARD` is there."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, object] = {}  # storages by address; held, so that no address comes twice
        self.launches = 0

    def __enter__(self) -> PretendCard:
        self._launch = launch = interpreter.GridExecutor.__call__

        def checked(executor: Any, *arguments: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction():
                for name, tensor in zip(executor.arg_names, arguments, strict=False):
                    if isinstance(tensor, Tensor) and not self._on_card(tensor):
                        raise WrongDevice(f"{executor.fn.__name__}: {name} lies in the host's memory")
                self.launches += 1
                return launch(executor, *arguments, **options)

        interpreter.GridExecutor.__call__ = checked
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        interpreter.GridExecutor.__call__ = self._launch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of torch's."""
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CARD if self._on_card(args[0]) else HOST
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self._on_card(args[0])
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        targets = [value for value in (*args, kwargs.get("device")) if isinstance(value, torch.device)]
        args = tuple(HOST if isinstance(value, torch.device) else value for value in args)
        if "device" in kwargs:
            kwargs["device"] = HOST if kwargs["device"] is not None else None
        involved = [tensor for tensor in _tensors((args, kwargs)) if tensor.numel()]
        self._check(func, args, involved)
        source_on_card = bool(involved) and self._on_card(involved[0])
        result = func(*args, **kwargs)
        lands = targets[0] == CARD if targets else source_on_card and func is not Tensor.cpu
        if isinstance(result, Tensor) and func in (Tensor.to, Tensor.cpu) and lands != source_on_card:
            result = result.clone()
        if lands:
            for tensor in _tensors(result):
                storage = tensor.untyped_storage()
                self._there[storage.data_ptr()] = storage
        return result

    def _check(self, func: Callable[..., Any], args: tuple[Any, ...], involved: list[Tensor]) -> None:
        """All on one side; but copies cross over, numbers go with both, and a card's tensor may be indexed from the host."""
        if func in _CROSSES:
            return
        if func in _INDEXES and self._on_card(args[0]):
            involved = [args[0], *_tensors(args[2:])]
        sides = {self._on_card(tensor) for tensor in involved if tensor.ndim}
        if len(sides) > 1:
            where = [("card" if self._on_card(tensor) else "host", tuple(tensor.shape)) for tensor in involved]
            raise WrongDevice(f"{getattr(func, '__name__', func)} mixes {where}")

    def _on_card(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._there
