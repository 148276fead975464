"""FP8 state of checkpoints as a run leaves it, with scales of a KV cache or without."""

from dataclasses import replace
from pathlib import Path

import torch
from installed import CACHE
from scoring import TOKENS
from transformers import AutoModelForCausalLM, DynamicCache

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.planning.make_plan import make_plan


def states_for(directory: Path, recipe: DelayedScaling) -> Fp8States:
    """State as after training: each module's input amax is its number, somewhere in the middle of the history."""
    gemms = make_plan(open_checkpoint(directory), "megatron").gemms
    modules = {}
    for number, module in enumerate(gemms, 1):
        history = torch.zeros(recipe.amax_history_len)
        if len(history) > 1:
            history[len(history) // 2] = float(number)
            history[-1] = number / 2
        scale = torch.tensor(448.0 / number / 2**recipe.margin)
        modules[module] = Fp8State({role: RoleState(scale, history) for role in ROLES})
    return Fp8States(
        recipe, modules, producer="test", iteration=123, of_weights=digest_weights(open_checkpoint(directory))
    )


SHORT = DelayedScaling(amax_history_len=8)


def cached_amaxes(directory: Path) -> list[tuple[float, float]]:
    """The largest key and value that transformers caches for some tokens, layer by layer."""
    cache = DynamicCache()
    with torch.no_grad():
        AutoModelForCausalLM.from_pretrained(directory)(TOKENS, **{CACHE: cache})
    return [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers]


def with_cache_state(directory: Path) -> Fp8States:
    """State as after training, and as `calibrate` leaves it for the cache: in one row of several."""
    states = states_for(directory, SHORT)
    modules = dict(states.modules)
    for layer, amaxes in enumerate(cached_amaxes(directory)):
        roles = {}
        for role, amax in zip(("k", "v"), amaxes, strict=True):
            history = torch.zeros(SHORT.amax_history_len)
            history[3], history[-1] = amax, amax / 2
            roles[role] = RoleState(torch.tensor(448.0 / amax), history)
        modules[f"decoder.layers.{layer}.self_attention.core_attention"] = Fp8State(roles)  # type: ignore[arg-type]
    return replace(states, modules=modules)
