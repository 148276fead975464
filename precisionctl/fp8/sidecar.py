"""The sidecar: a checkpoint's FP8 state as a safetensors file, without pickles.

Tensors: `<module>/<role>.scale` and `<module>/<role>.amax_history`, FP32 as in `RoleState`; `<module>/raw` (uint8) for
a TE payload that could not be decoded; `<module>/<role>.statistics`, FP64 `[26]`, where they were measured
(`Statistics.as_row`). The rest is JSON under a single metadata key, `precisionctl`: safetensors stores several keys
in random order, and equal states must give equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from precisionctl.codes.statistics import ROW_LENGTH, Statistics
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownFormat
from precisionctl.fp8.state import ATTENTION, ROLES, DelayedScaling, Fp8State, Fp8States, Role, RoleState
from precisionctl.sizes import size
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_files import has_file
from precisionctl.untrusted.safe_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

RELATIVE = Path("precisionctl/fp8_state.safetensors")
"""Its path in a checkpoint. Not at the top, where inference engines load every safetensors file."""

LIVE = Path("precisionctl/te_state.safetensors")
"""Path in a Hugging Face directory of the state that the model there computes with, in Transformer Engine. State in
RELATIVE is only carried along."""

FORMAT_VERSION = 2
"""Version 1, which had no roles of attention and no statistics, is read as well."""

_MAX_BYTES = 2_000_000_000
"""Largest sidecar that is accepted, as it is read whole. DeepSeek-V3's has 0.6 GB with 1024 rows of history."""

_MAX_METADATA = 1 << 16
"""Most characters of metadata that are accepted. Ours has some five hundred."""

_KEY = "precisionctl"
_STATISTICS = ".statistics"
_LEAVES = tuple(f"{role}.{part}" for role in ROLES + ATTENTION for part in ("scale", "amax_history"))


def write(path: Path, states: Fp8States) -> None:
    """Write and sync the sidecar, creating its directory. Equal states give equal bytes. Raises OSError."""
    from safetensors.torch import save  # imports torch

    tensors = {f"{module}/raw": _own(data) for module, data in states.raw.items()}
    for module, state in states.modules.items():
        for role, part in state.roles.items():
            tensors[f"{module}/{role}.scale"] = _own(part.scale)
            tensors[f"{module}/{role}.amax_history"] = _own(part.amax_history)
    for module, measured in states.statistics.items():
        for role, statistics in measured.items():
            tensors[f"{module}/{role}{_STATISTICS}"] = torch.tensor(statistics.as_row(), dtype=torch.float64)
    metadata = {
        "format_version": FORMAT_VERSION,
        "recipe": asdict(states.recipe),
        "producer": states.producer,
        "iteration": states.iteration,
    }
    if states.of_weights is not None:
        metadata["of_weights"] = states.of_weights
    content = save(tensors, {_KEY: json.dumps(metadata, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:  # not by the library, which does not raise OSError for a full disk
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _own(tensor: Tensor) -> Tensor:
    """A copy with its own memory on the CPU: fresh states share tensors, which safetensors refuses to store."""
    return tensor.detach().cpu().contiguous().clone()


def find(checkpoint: Path, relative: Path = RELATIVE) -> Fp8States | None:
    """The states in the sidecar of a checkpoint's directory, if it has one. Raises as `read` does."""
    path = checkpoint / relative
    return read(path) if has_file(path, checkpoint) else None


def is_sidecar(path: Path) -> bool:
    """Whether a path is a file whose metadata say that it is a sidecar."""
    # Opening a pipe would wait forever, and a file is mapped whole, of which an address space may have no room
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return False
    try:
        with safe_open(path, framework="np") as file:
            return _KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read(path: Path) -> Fp8States:
    """The states in a sidecar.

    Raises UnknownFormat for the version of another release, DamagedCheckpoint for a file that is truncated or
    contradicts itself.
    """
    if path.exists() and not path.is_file():
        raise DamagedCheckpoint("an FP8 sidecar that is not a file", where=path)
    if path.exists() and path.stat().st_size > _MAX_BYTES:  # a sparse file can be large for free
        what = f"an FP8 sidecar of more than {size(_MAX_BYTES)}"
        raise DamagedCheckpoint(what, where=path, do="Is the copy whole?")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        do = "Give a file that `precisionctl calibrate` or a recorder wrote, and copy it again if it is one."
        raise DamagedCheckpoint(f"the FP8 sidecar cannot be read: {error}", where=path, do=do) from error

    fields = _fields(metadata.get(_KEY, ""), path)
    raw = {name.removesuffix("/raw"): tensors.pop(name) for name in list(tensors) if name.endswith("/raw")}
    for module, data in raw.items():
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise DamagedCheckpoint(f"{module}/raw in an FP8 sidecar is not bytes", where=path)
    statistics = _read_statistics(
        {name: tensors.pop(name) for name in list(tensors) if name.endswith(_STATISTICS)}, path
    )
    try:
        recipe = DelayedScaling(**fields["recipe"])
    except (KeyError, TypeError, RecipeError) as error:
        raise DamagedCheckpoint(f"the FP8 sidecar's recipe makes no sense: {error}", where=path) from error

    names = set()
    for name in tensors:
        module, _, leaf = name.rpartition("/")
        if not module or leaf not in _LEAVES:
            raise DamagedCheckpoint(f"an FP8 sidecar with a tensor {name!r}", where=path)
        names.add(module)
    modules = {module: _read_module(module, tensors, recipe, path) for module in sorted(names)}
    return Fp8States(
        recipe,
        modules,
        raw,
        fields["producer"],
        fields["iteration"],
        statistics,
        fields.get("of_weights"),
    )


def _fields(text: str, path: Path) -> Mapping[str, Any]:
    """The metadata: of a version that is read here, and with what says who made the states and when."""
    if len(text) > _MAX_METADATA:  # a few bytes of JSON can become hundreds in memory
        raise DamagedCheckpoint("the FP8 sidecar's metadata is too long", where=path)
    fields = parse_json(text.encode(), f"{path}, its metadata")
    version = fields.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        shown = version if isinstance(version, int) else "unknown"
        raise UnknownFormat(
            f"an FP8 sidecar of format version {shown}; this release reads up to {FORMAT_VERSION}",
            where=path,
            do="Read it with the release that wrote it.",
        )
    iteration = fields.get("iteration", "missing")
    has_iteration = iteration is None or (type(iteration) is int and iteration >= 0)
    has_origin = isinstance(fields.get("producer"), str) and isinstance(fields.get("of_weights", ""), str)
    if not has_iteration or not has_origin:
        raise DamagedCheckpoint("the FP8 sidecar does not say who made it and when", where=path)
    return fields


def _read_module(module: str, tensors: Mapping[str, Tensor], recipe: DelayedScaling, path: Path) -> Fp8State:
    """The state of one module: of a `core_attention` the roles of attention that are stored, else all of a GEMM."""
    parts = ("scale", "amax_history")
    roles = tuple(role for role in ROLES + ATTENTION if any(f"{module}/{role}.{part}" in tensors for part in parts))
    of_attention = module.rpartition(".")[2] == "core_attention"
    wanted = tuple(role for role in roles if role in ATTENTION) if of_attention else ROLES
    leaves = [f"{role}.{part}" for role in wanted for part in parts]
    if missing := [leaf for leaf in leaves if f"{module}/{leaf}" not in tensors]:
        raise DamagedCheckpoint(f"the FP8 sidecar lacks {module}/{missing[0]}", where=path)
    if others := set(roles) - set(wanted):
        kind = "attention" if of_attention else "a GEMM"
        raise DamagedCheckpoint(f"{module} has roles that are not of {kind}: {min(others)}", where=path)
    state = Fp8State(
        {
            role: RoleState(tensors[f"{module}/{role}.scale"], tensors[f"{module}/{role}.amax_history"])
            for role in wanted
        }
    )
    state.check(recipe, f"{path}: {module}")
    return state


def _read_statistics(tensors: Mapping[str, Tensor], path: Path) -> Mapping[str, Mapping[Role, Statistics]]:
    found: dict[str, dict[Role, Statistics]] = {}
    for name, numbers in sorted(tensors.items()):
        module, _, leaf = name.removesuffix(_STATISTICS).rpartition("/")
        role = next((role for role in ROLES + ATTENTION if role == leaf), None)
        if not module or role is None or numbers.dtype != torch.float64 or numbers.shape != (ROW_LENGTH,):
            raise DamagedCheckpoint(f"an FP8 sidecar with a tensor {name!r}", where=path)
        try:
            found.setdefault(module, {})[role] = Statistics.from_row(numbers.tolist())
        except ValueError as error:
            raise DamagedCheckpoint(f"{name} in an FP8 sidecar: {error}", where=path) from error
    return found
