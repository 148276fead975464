"""The weights of FP8 GEMMs in a model that `load_te` has made, and the memory that tensors take."""

import gc

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from precisionctl.trainer.backends.base import fp8_linears


def fp8_weights(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Each one's parameter, and the scale in its state, FP32 `[]` on the CPU, by name."""
    found = {}
    for name, linear in fp8_linears(model).items():
        state = linear.fp8_state()
        assert state is not None and isinstance(linear, nn.Module)
        scale = state.roles["weight"].scale
        named = {"weight": scale} if scale.dim() == 0 else {f"weight{i}": one for i, one in enumerate(scale)}
        found |= {f"{name}.{weight}": (linear.get_parameter(weight), one) for weight, one in named.items()}
    return found


def taken() -> int:
    """Bytes of all tensors: those that are allocated on a GPU, or, where there are none, all that Python knows of, so
    that none can hide. Other tests leave fake ones, which have no bytes."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not is_fake(each)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return torch.cuda.memory_allocated() or sum(storages.values())


def cast(values: Tensor, scale: Tensor) -> Tensor:
    """TE's cast, spelled out: times the scale, saturated, rounded. E4M3 codes as bytes, on the CPU."""
    return (values.cpu().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
