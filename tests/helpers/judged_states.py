"""FP8 state that the readiness report judges: healthy, and with one thing wrong."""

import torch

from precisionctl.codes.health import measure
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.readiness.judge import judge

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPE = DelayedScaling(amax_history_len=17)


def recorded(*amaxes, scale=None, role="input"):
    """A history of 17 rows whose newest ones are these, oldest first; with the scale of the largest, or another."""
    history = torch.zeros(17)
    history[17 - len(amaxes) :] = torch.tensor(amaxes)
    made = 448.0 / max(amaxes) if scale is None else scale
    return RoleState(torch.tensor(made), history)


MODULES = [f"decoder.layers.{layer}.mlp.linear_{part}" for layer in range(3) for part in ("fc1", "fc2")]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outlier(values):
    """One channel a million times the rest."""
    values = values.clone()
    values[:, 3] = 1e6
    return values


def healthy():
    """Weights and a state in which everything was recorded and measured, of which nothing is wrong."""
    values = gaussian(256, 256)
    scale = {"input": 448.0 / 5, "grad_output": 57344.0 / 5}
    statistics = {
        role: measure(values, RECIPE.dtype(role), torch.tensor(scale[role])) for role in ("input", "grad_output")
    }
    roles = dict(Fp8State.fresh(17).roles)
    for role in ("input", "weight", "grad_output"):
        amax = values.abs().amax()
        roles[role] = recorded(*[float(amax)] * 16, scale=float(after_one_update(amax, role, RECIPE).scale))
    weight = measure(values, E4M3, roles["weight"].scale, square=True)
    states = Fp8States(RECIPE, {m: Fp8State(roles) for m in MODULES}, statistics={m: statistics for m in MODULES})
    return {m: [weight] for m in MODULES}, states


def judged(modules, weights, states):
    """The verdict on modules of a size that FP8 GEMMs take, by a state of these very weights."""
    return judge(dict.fromkeys(modules, (256, 256)), weights, states)
