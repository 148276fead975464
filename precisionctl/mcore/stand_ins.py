"""Replacements for some functions of megatron-core (0.16 and later). Most let a run work on CPUs with gloo, to be tried
and tested there, where megatron-core asks for a GPU or Transformer Engine. Two correct errors that occur anywhere."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaToCpu(TorchFunctionMode):
    """A mode of PyTorch in which tensors for `cuda` are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


class _NoStream:
    """Stands in for CUDA's streams and events: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        return lambda *_, **__: self


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """A context in which megatron-core trains correctly, also on a CPU and with PyTorch's Adam. Functions that are
    replaced stay so in this process."""
    support_pytorch_adam()
    _fix_padding_mask()
    with contextlib.nullcontext() if torch.cuda.is_available() else without_cuda():
        yield


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """A context in which megatron-core runs on a CPU: stand-ins for what it asks of CUDA only. Leaving it undoes the
    mode that makes tensors on the CPU; the stand-ins for functions stay in the process."""
    _stand_in_for_cuda()
    with _CudaToCpu():
        yield


@cache
def _fix_padding_mask() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    count_loads = TopKRouter._apply_expert_bias

    def without_padding(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """0.16.1 does not broadcast the mask, `[tokens]`, True at padding, to `routing_map`, `[tokens, experts]`."""
        count_loads(self, routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    TopKRouter._apply_expert_bias = without_padding


@cache
def _stand_in_for_cuda() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.current_stream = cuda.default_stream = _NoStream
    cuda.stream = contextlib.nullcontext
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    by_name = tensor.type

    def type_on_gpu(self: torch.Tensor, *dtype: Any) -> Any:
        """Optimizers look for `torch.cuda.FloatTensor` and its like."""
        return by_name(self, *dtype) if dtype else f"torch.cuda.{by_name(self).rpartition('.')[2]}"

    tensor.type = type_on_gpu
    # Dropout is 0, so that layers which are computed again need no states
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None
    again = random.CheckpointFunction.backward

    def compute_again(*arguments: Any) -> Any:
        with _CudaToCpu():  # modes do not reach code that backward computes again
            return again(*arguments)

    random.CheckpointFunction.backward = staticmethod(compute_again)
    moe_utils.te_general_gemm = None  # a name that 0.16 misses without Transformer Engine

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Sizes that collectives take as numbers; Megatron's own converts only tensors on a GPU."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


@cache
def support_pytorch_adam() -> None:
    """Let a checkpoint be loaded into PyTorch's Adam, which Megatron uses without Transformer Engine and Apex. That
    Adam has no state before its first step, and counts updates for each parameter, where a checkpoint has one count for
    all."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    distributed: Any = distrib_optimizer.DistributedOptimizer
    set_state, sharded = distributed._set_main_param_and_optimizer_states, distributed.sharded_state_dict

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()  # Megatron gives all of them one tensor, which each would count up
        set_state(self, parameter, {"step": state["step"], **tensors})

    def with_state(self: Any, *arguments: Any, **named: Any) -> Any:
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, *arguments, **named)

    distributed._set_main_param_and_optimizer_states, distributed.sharded_state_dict = with_step, with_state
