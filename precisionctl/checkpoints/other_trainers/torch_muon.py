"""What torch.optim.Muon (PyTorch 2.9 and later) keeps of matrices that Megatron's Muon trained. Both average gradients
alike, so the momentum is the same; torch stores with it how an update is made of it, Megatron leaves that to its
arguments."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.rearrangements import Transposed
from precisionctl.checkpoints.other_trainers.trainer_run import ParameterGroup, muon_settings
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, shown
from precisionctl.untrusted.safe_pickle import is_count

_SCALES = {
    "spectral": ("match_rms_adamw", 0.2),
    "unit_rms_norm": ("spectral_unclamped", 1.0),  # since PyTorch 2.14
    "shape_scaling": ("original", 1.0),
}
"""Megatron's scales of an update by a matrix's sizes, as torch calls them, and the further factor that torch has."""

_COEFFICIENTS, _EPSILON = (3.4445, -4.775, 2.0315), 1e-7
"""torch's defaults, which are Megatron's `simple` ones."""


def torch_muon(
    args: Mapping[str, Any], group: Mapping[str, Any], rows: Sequence[Row], where: Path
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The settings of a group of torch.optim.Muon that makes the updates of Megatron's Muon, and in words what differs.
    `args` are as by `read_muon_args`, and `group` has `lr`, `weight_decay`, `momentum` and perhaps `initial_lr`; `rows`
    are those of the matrices, as the model's class has them. Where Megatron has another factor of updates than torch,
    rates have it. Raises CheckpointError for a scale or a number of steps that torch has not, for a scale that depends
    on which way a matrix stands where the class has it transposed, and for rates that become no normal numbers;
    DamagedCheckpoint for values that are none."""
    wanted = ("muon_scale_mode", "muon_extra_scale_factor", "muon_nesterov", "muon_num_ns_steps")
    mode, factor, nesterov, steps = (args.get(key) for key in wanted)
    scale = _SCALES.get(mode) if isinstance(mode, str) else None
    has_factor = isinstance(factor, int | float) and not isinstance(factor, bool) and _is_normal(factor)
    has_steps = is_count(steps) and steps < 100  # more torch refuses (torch/optim/_muon.py)
    if factor is None or not (scale and has_factor and isinstance(nesterov, bool) and has_steps):
        said = f"a scale of {shown(mode)}, factor {shown(factor)}, Nesterov {shown(nesterov)}, {shown(steps)} steps"
        what = f"torch's Muon does not make the updates that Megatron's arguments say ({said})"
        has = f"the scales {', '.join(_SCALES)}, and 99 steps at most"
        raise CheckpointError(f"{what}: it has {has}", where=where, do=DROP_OPTIMIZER)
    kept, (name, of_torch) = muon_settings([ParameterGroup(group)], where), scale
    transposed = next((row.hf[0] for row in rows if isinstance(row.rearrangement, Transposed)), None)
    if transposed and name != "match_rms_adamw":
        what = (
            f"{_module(transposed)} is [in, out] in its class, where torch's Muon scales an update by rows over columns"
        )
        raise CheckpointError(f"{what}, and the run by out / in ({mode})", where=where, do=DROP_OPTIMIZER)
    times = factor / of_torch
    rates = {key: kept[key] * times for key in ("lr", "initial_lr") if key in kept}
    rates["weight_decay"] = kept["weight_decay"] / times
    for key, rate in rates.items():
        if not _is_normal(rate) and (kept[key] or rate):  # 0 stays 0, and is NaN times infinity
            what = f"its {key} of {kept[key]:g} would be {rate:g} in torch's Muon, for a factor of {factor:g}"
            raise CheckpointError(what, where=where, do=DROP_OPTIMIZER)
    notes = []
    if times != 1:
        notes.append(
            f"its lr is {times:g} times the run's and its weight_decay as many times smaller, for its factor of an "
            f"update is {of_torch:g} where the run had {factor:g}"
        )
    if name == "spectral_unclamped":
        notes.append(f"PyTorch before 2.14 does not know its scale `{name}`, and takes 1 for it without an error")
    if args.get("muon_coefficient_type") != "simple":
        notes.append("it has one set of Newton-Schulz coefficients, the `simple` ones, where the run had others")
    notes += _otherwise_divided(rows, split_qkv=args.get("muon_split_qkv") is not False)
    settings = {
        **kept,
        **rates,
        "nesterov": nesterov,
        "ns_coefficients": _COEFFICIENTS,
        "eps": _EPSILON,
        "ns_steps": steps,
        "adjust_lr_fn": name,
    }
    settings.setdefault("initial_lr", settings["lr"])
    return settings, tuple(notes)


def _otherwise_divided(rows: Sequence[Row], *, split_qkv: bool) -> list[str]:
    """In words, which matrices the run orthogonalized whole and torch's Muon in the parts that the class has, and the
    other way around."""
    fused, parts = dict[str, None](), dict[str, None]()
    for row in rows:
        names = ", ".join(map(_module, row.hf))
        split = split_qkv and row.megatron.endswith(".linear_qkv.weight")
        if split and len(row.hf) == 1:
            fused[names] = None
        elif not split and len(row.hf) > 1:
            parts[names] = None
    return [
        *(f"it orthogonalizes {each} whole, where the run had queries, keys and values one by one" for each in fused),
        *(f"it orthogonalizes {each} one by one, where the run had them in one matrix" for each in parts),
    ]


def _module(name: str) -> str:
    return f"`{name.removesuffix('.weight').rpartition('.')[2]}`"


def _is_normal(value: float) -> bool:
    """Whether it is above 0, finite, and a float with all its bits."""
    return sys.float_info.min <= value <= sys.float_info.max
