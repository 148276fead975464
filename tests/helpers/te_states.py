"""The state in the golden TE payloads, as tests expect it; golden/te_payloads.py says how it was made."""

import repository
import torch

from precisionctl.fp8.state import BACKWARD, FORWARD, DelayedScaling, Fp8State, RoleState

PAYLOADS = repository.GOLDEN / "te"

RECIPES = {
    "linear": DelayedScaling(amax_history_len=4),
    "linear_printed": DelayedScaling(
        margin=2,
        fp8_format="E4M3",
        amax_history_len=4,
        amax_compute_algo="most_recent",
        reduce_amax=False,
        fp8_dpa=True,
        fp8_mha=True,
    ),
    "megatron": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
}
"""Payloads of one GEMM."""

OTHERS = ["layernorm_mlp", "attention"]
"""Sound ones of something else: of two GEMMs, and of attention with numbers in columns that it does not use."""

OTHER_FORMS = ["operation", "te_1"]
"""Of one GEMM, in another form; the operation has no output and no grad_input."""

EMPTY = ["none", "empty_dict", "current_scaling", "block_scaling", "mxfp8", "nvfp4"]
"""Ones without state."""


def trained(history: int) -> Fp8State:
    """Scale 2**column; row r of the history r + column/8 but for row 0; backward columns 100 times as large."""
    roles = {}
    for names, factor in ((FORWARD, 1), (BACKWARD, 100)):
        for column, role in enumerate(names):
            rows = factor * (torch.arange(float(history)) + column / 8)
            rows[0] = 0
            roles[role] = RoleState(torch.tensor(factor * 2.0**column), rows)
    return Fp8State(roles)


def same(a: Fp8State, b: Fp8State) -> bool:
    return a.roles.keys() == b.roles.keys() and all(
        torch.equal(a.roles[role].scale, b.roles[role].scale)
        and torch.equal(a.roles[role].amax_history, b.roles[role].amax_history)
        for role in a.roles
    )
