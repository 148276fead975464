"""The gated delta rule in plain PyTorch, chunk by chunk (arXiv 2412.06464, section 3.3); or on a GPU, in BF16, by
flash-linear-attention where that is installed and its gradients are right.

Each head has a state `S` `[K, D]`, of zeros at first, which decays by `exp(g)` and learns by a step of size `b` to give
the value `v` for the key `k`: `S' = exp(g) S`, then `S = S' + b k (v - S'^T k)^T`. Queries read it: `S^T q`. The steps
of a chunk depend on one another by a triangular system, which is solved at once.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from precisionctl.trainer.model.recurrence import decays_between, in_chunks

_EPSILON = 1e-6
"""Added to the squares of a query's or a key's length, which both are divided by."""


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Queries and keys `[B, S, H, K]`, values `[B, S, N, D]`, `g` and `b` `[B, S, N]`, N a multiple of H; gives
    `[B, S, N, D]`, computed in FP32 or wider, in the values' dtype."""
    if value.is_cuda and value.dtype == torch.bfloat16 and (kernel := _flash_kernel()):
        return kernel(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    length, wide = value.shape[1], torch.promote_types(value.dtype, torch.float32)
    served = value.shape[2] // key.shape[2]
    query, key = (_of_length_1(heads.to(wide)).repeat_interleave(served, 2) for heads in (query, key))
    query = query * key.shape[-1] ** -0.5
    query, key, new, rates, decays = (
        in_chunks(each.to(wide)) for each in (query, key, value, beta[..., None], decay[..., None])
    )  # [B, N, chunks, CHUNK, ...]
    past = decays.cumsum(3)  # the logarithm of what decays from a chunk's beginning to each token
    between = decays_between(past)
    system = rates * (key @ key.mT) * between  # only what is below its diagonal counts
    learned = torch.linalg.solve_triangular(system, rates * new, upper=False, unitriangular=True)
    read = torch.linalg.solve_triangular(system, rates * past.exp() * key, upper=False, unitriangular=True)
    seen = (query @ key.mT) * between
    from_state, to_state = query * past.exp(), key * (past[..., -1:, :] - past).exp()
    whole = past[..., -1:, :].exp()
    state = new.new_zeros(*new.shape[:2], key.shape[-1], new.shape[-1])
    outputs = []
    for chunk in range(new.shape[2]):
        steps = learned[:, :, chunk] - read[:, :, chunk] @ state
        outputs.append(from_state[:, :, chunk] @ state + seen[:, :, chunk] @ steps)
        state = whole[:, :, chunk] * state + to_state[:, :, chunk].mT @ steps
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(value.dtype)


@cache
def _flash_kernel() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The same function: of log decays, queries scaled by the root of their size, heads grouped alike, and lengths with
    the same epsilon (0.6.0, ops/gated_delta_rule/chunk.py). None without the package, and where it says that its
    gradients are wrong: there its backward raises, unless tilelang takes it over, which it does for some shapes only
    (ops/common/chunk_o.py, chunk_bwd_dqkwg)."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
    except ImportError:
        return None
    if IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1:
        return None
    rule: Callable[..., tuple[Tensor, Tensor | None]] = chunk_gated_delta_rule
    return rule


def _of_length_1(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPSILON)
