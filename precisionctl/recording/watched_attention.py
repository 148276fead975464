"""Keys and values on their way into transformers' attention, where no module has them."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn

OnCache = Callable[[str, Tensor, Tensor], None]
"""Called with the name of an attention, keys (after rotary embedding) and values, `[B, heads, S, channels]`."""


def watch_attention(modules: Mapping[nn.Module, str], on_cache: OnCache) -> Callable[[], None]:
    """Call `on_cache` whenever one of these attention modules attends. Returns a function that ends this.

    transformers' models get their attention function from AttentionInterface, and call it with module, queries, keys
    and values. Here they get one that shows these to `on_cache` first.
    """
    from transformers.modeling_utils import AttentionInterface

    asked = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, *args: Any) -> Callable[..., Any]:
        attend = asked(self, *args)

        @wraps(attend)
        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> Any:
            if module in modules:
                on_cache(modules[module], key, value)
            return attend(module, query, key, value, *rest, **others)

        return watched

    def end() -> None:
        # Of two recorders the first to begin may be the first to end: then its function stays, and shows nothing
        nonlocal modules
        modules = {}
        if AttentionInterface.get_interface is get_interface:
            AttentionInterface.get_interface = asked

    AttentionInterface.get_interface = get_interface
    return end
