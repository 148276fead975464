"""Megatron-Core's Muon: whether it is there and computes what a recipe asks for, and the state that its optimizers,
which are not distributed ones, begin with."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from precisionctl.errors import EnvironmentProblem, RecipeError
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import MOMENTUM
from precisionctl.recipe import MUON_KEYS, Optimizer, Recipe
from precisionctl.trainer.backends.te_version import version_parts
from precisionctl.trainer.optimizer.muon import qkv_rows

_NESTEROV, _COEFFICIENTS = "muon_nesterov", "muon_coefficient_type"


def check_muon(model: ModelShape, recipe: Recipe) -> None:
    """Raise RecipeError where Megatron's Muon would divide a linear_qkv otherwise than the bundled one: by one size of
    queries and one of keys and values for all layers, and by groups that each rank has whole
    (megatron/core/optimizer/muon.py)."""
    if not (recipe.optimizer.by_muon and recipe.optimizer.muon_split_qkv) or model.mla:
        return
    advice = "Give --set optimizer.muon_split_qkv=false, or leave --engine out."
    if recipe.parallel.tensor > model.num_query_groups:
        what = f"parallel.tensor is {recipe.parallel.tensor}, and there are {model.num_query_groups} groups of queries"
        raise RecipeError(f"{what}: Megatron's Muon does not split those that ranks share", do=advice)
    of_group = model.num_attention_heads // model.num_query_groups * model.kv_channels
    theirs = (of_group, model.kv_channels, model.kv_channels)
    for layer in filter(model.has_attention, range(model.num_layers)):
        if (ours := qkv_rows(model, layer)) != theirs:
            what = f"Megatron's Muon splits a group of linear_qkv into {theirs} rows, and layer {layer} has {ours}"
            raise RecipeError(what, do=advice)


def require_muon(settings: Optimizer) -> None:
    """Raise EnvironmentProblem without emerging_optimizers, with which megatron-core orthogonalizes, or with another
    version than it calls; RecipeError for settings of Muon that these versions do not have."""
    core = version("megatron-core")
    older = version_parts(core) < (0, 18)  # pyproject.toml of each names the version that it calls
    found = import_module("emerging_optimizers").__version__ if find_spec("emerging_optimizers") else None
    try:
        _their_muon()([nn.Parameter(torch.zeros(1, 1))])
    except TypeError as error:
        wanted = "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0" if older else "emerging-optimizers"
        raise EnvironmentProblem(
            f"Muon in megatron-core {core} needs emerging_optimizers {'0.1' if older else '0.2 or newer'}, and "
            f"{found or 'none'} is installed",
            do=f"pip install '{wanted}', or leave --engine out: the bundled trainer has its own.",
        ) from error
    kind, steps = settings.muon_coefficient_type, settings.muon_num_ns_steps
    if kind != "quintic" and _COEFFICIENTS not in _known_words():
        raise RecipeError(
            f"megatron-core {core} has no {kind} coefficients of Muon, but the quintic ones alone",
            do="Leave optimizer.muon_coefficient_type out, or --engine megatron-core, or install megatron-core 0.17.",
        )
    try:
        package = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
        import_module(package).newton_schulz(torch.ones(1, 1), steps, kind)
    except ValueError as error:
        why = str(error).rstrip(".")
        raise RecipeError(
            f"emerging_optimizers {found} does not take optimizer.muon_num_ns_steps = {steps}: {why}",
            do="Give another number, or leave --engine out.",
        ) from error


def _their_muon() -> Any:
    """The class of Megatron's Muon, which has another module since 0.17."""
    old, new = (f"megatron.core.optimizer.{name}" for name in ("muon", "emerging_optimizers"))
    return import_module(new if find_spec(new) else old).TensorParallelMuon


def _known_words() -> set[str]:
    from megatron.core.optimizer import OptimizerConfig

    return {field.name for field in fields(OptimizerConfig)}


def muon_words(settings: Optimizer) -> dict[str, Any]:
    """Muon's settings in the words of the installed OptimizerConfig; `require_muon` has refused what that has not.
    Tensor-parallel ranks orthogonalize whole matrices, as in the bundled trainer."""
    words, known = {key: getattr(settings, key) for key in MUON_KEYS}, _known_words()
    if _COEFFICIENTS not in known:
        words.pop(_COEFFICIENTS)
    if _NESTEROV not in known:  # before 0.18
        words["muon_use_nesterov"] = words.pop(_NESTEROV)
    return {"optimizer": "muon", "muon_tp_mode": "duplicated", **words}


def leave_out_momentum(wanted: Mapping[int, Any]) -> None:
    """Ask for no momentum in a state dict to load: AdamW trained the matrices, and has none."""
    for one in wanted.values():
        for state in one["optimizer"]["state"].values():
            state.pop(MOMENTUM, None)


def load_states(optimizers: Iterable[Any], loaded: Mapping[int, Any], updates: int) -> None:
    """Load masters and state into Muon's and Adam's optimizers. Parameter groups are the run's own: only the count of
    `updates` is taken from the checkpoint. Transformer Engine's and Apex's Adam count in groups, PyTorch's with each
    parameter, and Muon not."""
    for one, number in zip(optimizers, sorted(loaded), strict=True):
        inner = loaded[number]["optimizer"]
        inner.setdefault("state", {})  # Megatron leaves out what is empty, without momentum
        for group, own in zip(inner["param_groups"], one.param_groups, strict=True):
            group |= {key: value for key, value in own.items() if key != "params"}
            if "betas" in own:
                group["step"] = updates
        if _counts_with_parameters(one):
            inner["state"]["common_step"] = updates
        one.load_state_dict(loaded[number])


def begin_states(optimizers: Iterable[Any]) -> None:
    """Give each parameter without state the one that its first update would, so that a run which is saved before has
    it too, and so that a checkpoint without momentum may be gone on from."""
    for one in optimizers:
        one.init_state_fn(one.optimizer, one.config)
        if _counts_with_parameters(one):
            for state in one.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))


def _counts_with_parameters(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)
