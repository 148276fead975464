"""Models whose weights are loaded: drawing them first would take as long as reading them, or longer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class Undrawn(TorchFunctionMode):
    """A context in which modules are made without drawing random numbers: their weights are whatever memory held."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
