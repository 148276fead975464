"""Checkpoints as DeepSpeed 0.19.8 writes them, by torch.save alone (tests/peers/test_deepspeed.py has the real one)."""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

KINDS = ("fp32", "exp_avg", "exp_avg_sq")


@contextmanager
def classes() -> Iterator[tuple[Any, Any]]:
    """DeepSpeed's enum of stages and a class of its options, where pickles look for them."""
    stages = IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3})
    scaler = type("LossScaler", (), {})
    for name, one in (("deepspeed.runtime.zero.config", stages), ("deepspeed.runtime.fp16.loss_scaler", scaler)):
        one.__module__ = name
        for end in range(len(name.split("."))):
            parent = ".".join(name.split(".")[: end + 1])
            sys.modules.setdefault(parent, ModuleType(parent))
        setattr(sys.modules[name], one.__name__, one)
    yield stages, scaler
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


def states_of(tensors: Mapping[str, Tensor], seed: int = 5) -> dict[str, dict[str, Tensor]]:
    """Masters, which round to these weights and are others, and moments."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for name, tensor in tensors.items():
        made["fp32"][name] = tensor.bfloat16().float() * (1 + 2**-12)
        made["exp_avg"][name] = torch.randn(tensor.shape, generator=generator)
        made["exp_avg_sq"][name] = torch.rand(tensor.shape, generator=generator)
    return made


def save(
    root: Path,
    states: Mapping[str, Mapping[str, Tensor]],
    stage: int,
    ranks: int,
    *,
    frozen: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    groups: int = 2,
    padded: bool = False,
    spaced: bool = False,
    step: int = 3,
) -> Path:
    """A folder with `latest` and `global_step<step>`. `padded` leaves the padding at the end of the last rank's masters
    in, as the BF16 optimizer does; with `spaced` parameters of ZeRO 1 and 2 have padding of their own. The directory of
    the step is returned."""
    frozen, shared, buffers = frozen or {}, shared or {}, buffers or {}
    directory = root / f"global_step{step}"
    directory.mkdir(parents=True)
    (root / "latest").write_text(directory.name)
    names = list(states["fp32"])
    by_group = [names[group::groups] for group in range(groups)]
    shapes = [OrderedDict((name, states["fp32"][name].shape) for name in group) for group in by_group]
    bf16 = {name: tensor.bfloat16() for name, tensor in states["fp32"].items()} | dict(frozen)
    bf16 |= {name: bf16[of] for name, of in shared.items()}
    empty = torch.empty(0, dtype=torch.bfloat16)
    model: dict[str, Any] = {
        "module": OrderedDict((n, empty if stage == 3 else t) for n, t in bf16.items()) | OrderedDict(buffers),
        "buffer_names": [*buffers],
        "param_shapes": shapes if stage else None,
        "frozen_param_shapes": OrderedDict((name, one.shape) for name, one in frozen.items()) if stage > 1 else None,
        "shared_params": dict(shared),
        "frozen_param_fragments": None,
        "global_steps": step,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    for rank in range(ranks if stage == 3 else 1):
        if stage == 3:
            model["frozen_param_fragments"] = OrderedDict((n, _piece(one, rank, ranks)) for n, one in frozen.items())
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, directory / name)
    for rank in range(ranks if stage else 0):
        with classes() as (stage_enum, scaler):
            flat = {
                kind: [
                    _flat(states[kind], group, stage, rank, ranks, padded or kind != "fp32", spaced)
                    for group in by_group
                ]
                for kind in KINDS
            }
            moments = {
                number: {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
                for number, (first, second) in enumerate(zip(flat["exp_avg"], flat["exp_avg_sq"], strict=True))
            }
            settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "initial_lr": 2e-3}
            base = {"state": moments, "param_groups": [settings | {"params": [number]} for number in range(groups)]}
            content = {"zero_stage": stage_enum(stage), "loss_scaler": scaler(), "partition_count": ranks}
            if stage == 3:
                content |= {"fp32_flat_groups": flat["fp32"], "optimizer_state_dict": base}
            else:
                content |= {"single_partition_of_fp32_groups": flat["fp32"], "base_optimizer_state": base}
                content["partition_count"] = [ranks] * groups
                content["param_alignment_paddings"] = [[3 * spaced] * len(group) for group in by_group]
            path = directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": content, "ds_config": {}, "ds_version": "0.19.8"}, path)
    return directory


def save_universal(directory: Path, states: Mapping[str, Mapping[str, Tensor]], *, flat: bool = False) -> Path:
    """A universal checkpoint, without model states; `flat` as made of ZeRO 3."""
    for name in states["fp32"]:
        folder = directory / "zero" / name
        folder.mkdir(parents=True)
        for kind, tensors in states.items():
            one = tensors[name]
            torch.save(one.flatten() if flat else {"param": one, "cat_dim": 0}, folder / f"{kind}.pt")
        torch.save(torch.tensor(3.0), folder / "step.pt")
    torch.save({"param_groups": [{"lr": 1e-3}]}, directory / "zero" / "optimizer_state.pt")
    return directory


def _piece(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's piece of a parameter in ZeRO 3."""
    each = math.ceil(tensor.numel() / ranks)
    padded = torch.cat((tensor.flatten(), tensor.new_full((each * ranks - tensor.numel(),), -77)))
    return padded[rank * each : (rank + 1) * each].clone()


def _flat(
    tensors: Mapping[str, Tensor], group: Sequence[str], stage: int, rank: int, ranks: int, padded: bool, spaced: bool
) -> Tensor:
    if stage == 3:
        return torch.cat([_piece(tensors[name], rank, ranks) for name in group])
    between = torch.full((3 * spaced,), -77.0)
    whole = torch.cat([part for name in group for part in (tensors[name].flatten(), between)])
    each = -(-len(whole) // (2 * ranks)) * 2
    part = whole[rank * each : (rank + 1) * each]
    return torch.cat((part, torch.full((each - len(part),), -77.0))) if padded else part.clone()


def without_zero(states: Mapping[str, Mapping[str, Tensor]], *, bf16: bool = True) -> dict[str, Any]:
    """Model states without ZeRO, with an optimizer that has numbers: torch's own, or with BF16 in DeepSpeed's."""
    masters = states["fp32"]
    moments = [{kind: states[kind][name] for kind in KINDS[1:]} for name in states["exp_avg"]]
    numbered = {number: {"step": torch.tensor(3.0), **one} for number, one in enumerate(moments)}
    group = {"lr": 1e-3, "initial_lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(numbered)}
    optimizer: dict[str, Any] = {"state": numbered, "param_groups": [group]}
    if bf16:
        optimizer = {"optimizer_state_dict": optimizer, "fp32_groups": [[masters[name] for name in states["exp_avg"]]]}
    module = OrderedDict((name, tensor.bfloat16() if bf16 else tensor) for name, tensor in masters.items())
    return {
        "module": module,
        "buffer_names": ["a.buffer"],
        "optimizer": optimizer,
        "param_shapes": None,
        "shared_params": None,
        "global_steps": 3,
    }
