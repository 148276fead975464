"""Which recipes of FP8 and NVFP4 this machine runs, and which payloads of a checkpoint Transformer Engine will load."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.payloads import SavedPayload
from precisionctl.commands.notes import GATE
from precisionctl.errors import EnvironmentProblem, NotUnderstood
from precisionctl.fp8.extra_state import Payload, read_payload
from precisionctl.torch_when_used import torch
from precisionctl.trainer.backends.te_version import version_parts
from precisionctl.untrusted import safe_archive

PACKAGES = ("torch", "transformer-engine", "megatron-core", "transformers", "safetensors", "triton")
Capability = tuple[int, int]
"""Compute capability of a CUDA device, major and minor."""


VARIABLES: Mapping[str, str] = {
    GATE: "1: delayed-scaling state loads in Transformer Engine 2.16.1, 2.17.1 and from 2.18 on",
    "NVTE_UNFUSED_FP8_UPDATE": "1: scales are updated in another order of operations than in the kernel",
    "NVTE_DPA_FP8_RECIPE": "another recipe for attention than for linears",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": "history length of attention beside current scaling, else 1",
    "NVTE_DPA_FP8DS_AMAX_ALGO": "algorithm of attention beside current scaling, else most_recent",
    "NVTE_FP8_DPA_BWD": "0: the backward pass of attention stays out of FP8",
    "NVTE_BACKWARD_OVERRIDE": "high_precision or dequantized: what the backward pass takes in place of codes",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1: scales of current scaling are powers of two",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1: scales of block scaling are no powers of two",
    "NVTE_NVFP4_DISABLE_RHT": "1: NVFP4 without the Hadamard transform",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1: NVFP4 rounds gradients to nearest",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1: NVFP4 has a scale for 1 x 16 elements of weights, too",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1: NVFP4 has an FP32 scale for each row of an input",
    "NVTE_NVFP4_4OVER6": "NVFP4 has scales that bring an amax to 4 where less is lost by it",
    "NVTE_DEBUG": "1: extra logging of attention and backends",
}
"""Transformer Engine's environment variables, and what each does to FP8."""


@dataclass(frozen=True)
class RecipeSupport:
    """A recipe of Transformer Engine's, and why this machine cannot run it (`problem`), None where it can."""

    name: str
    problem: str | None


@dataclass(frozen=True)
class Machine:
    """What this machine has. `packages` are versions by name, None if not installed. `devices` are CUDA devices with
    their compute capability. `transformer_engine` says why it cannot run FP8 here, None if it can. `variables` are
    Transformer Engine's environment variables that are set."""

    python: str
    packages: Mapping[str, str | None]
    cuda: str | None
    devices: Mapping[str, Capability]
    transformer_engine: str | None
    recipes: tuple[RecipeSupport, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Payloads:
    """The FP8 payloads in a checkpoint: the number of each form, the number that Transformer Engine loads only if its
    environment variable GATE is set, and what to do."""

    path: str
    forms: Mapping[str, int]
    refused: int
    advice: tuple[str, ...]


def examine() -> Machine:
    """Examine this machine, without computing anything on its devices."""
    # Imported here, as it imports the trainer, which `examine_payloads` and with it `launch-args` do without
    from precisionctl.trainer.backends.choose import choose_backend

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {f"{i}: {torch.cuda.get_device_name(i)}": torch.cuda.get_device_capability(i) for i in range(count)}
    try:
        choose_backend("te")
        problem = None
    except EnvironmentProblem as error:
        problem = error.what.partition(": ")[2]
    weakest = min(devices.values(), default=None)
    return Machine(
        platform.python_version(),
        {name: _version(name) for name in PACKAGES},
        torch.version.cuda,
        devices,
        problem,
        recipes(weakest, version_parts(torch.version.cuda or "")),
        {name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def recipes(capability: Capability | None, cuda: tuple[int, ...]) -> tuple[RecipeSupport, ...]:
    """Which of TE's recipes a device can run with this version of CUDA (transformer_engine/pytorch/quantization.py,
    `_compute_*_support`, of 2.20)."""
    if capability is None:
        return tuple(RecipeSupport(name, "no CUDA device; `resume --backend emulated` runs it") for name in RECIPES)
    per_tensor = block = mx = nvfp4 = None
    if capability < (8, 9):
        per_tensor = "compute capability 8.9 or higher is needed"
    elif capability < (9, 0) and cuda < (12, 1):
        per_tensor = "CUDA 12.1 or newer is needed on Ada"
    if capability < (9, 0) or cuda < (12, 9):
        block = "compute capability 9.0 or higher and CUDA 12.9 or newer are needed"
    if capability >= (12, 0):
        mx = "not supported from compute capability 12.0 on"
    elif capability < (10, 0):
        mx = "compute capability 10.0 is needed"
    if capability < (10, 0):
        nvfp4 = "compute capability 10.0 or higher is needed"
    return tuple(map(RecipeSupport, RECIPES, (per_tensor, per_tensor, block, mx, nvfp4)))


def examine_payloads(reader: Reader, te_version: str | None) -> Payloads:
    """What the installed Transformer Engine (or, if there is none, a current one) can load of a checkpoint's
    payloads."""
    saved = list(reader.payloads()) if of_megatron(reader) else []
    forms: Counter[str] = Counter()
    refused = 0
    read: list[Payload] = []
    for one in saved:
        form, payload = _form(one)
        forms[form] += 1
        refused += is_refused(one.data, payload, form)
        read.extend([payload] if payload else [])
    return Payloads(str(reader.path), dict(forms), refused, tuple(_advice(forms, refused, read, te_version)))


_UNKNOWN = "not understood"


def _form(one: SavedPayload) -> tuple[str, Payload | None]:
    try:
        payload = read_payload(one.data, one.where)
    except NotUnderstood:
        return _UNKNOWN, None
    if payload is None:
        return "without state", None
    if one.data.startswith(safe_archive.MAGIC):
        return "a file, or a table (TE 0.1 to 0.5, 0.12 to 1.13)", payload
    return ("a pickle (TE 0.6 to 0.11, 1.14)" if payload.assumed else "a pickle with its recipe (TE 2)"), payload


def is_refused(data: bytes, payload: Payload | None, form: str = "") -> bool:
    """Whether a current Transformer Engine refuses a payload unless GATE is set (pytorch/_extra_state.py). It does so
    for everything that may hold delayed-scaling state, and for every file."""
    return payload is not None or form == _UNKNOWN or data.startswith(safe_archive.MAGIC)


def has_gate(te_version: str | None) -> bool:
    """Whether this version of Transformer Engine refuses delayed-scaling state unless GATE is set: 2.16.1, 2.17.1, and
    from 2.18 on. None stands for the newest."""
    if te_version is None:
        return True
    release = version_parts(te_version)
    return release >= (2, 18) or (2, 17, 1) <= release < (2, 18) or (2, 16, 1) <= release < (2, 17)


def _advice(forms: Counter[str], refused: int, read: list[Payload], te_version: str | None) -> list[str]:
    advice = []
    if refused and has_gate(te_version) and os.environ.get(GATE) != "1":
        whose = f"Transformer Engine {te_version}" if te_version else "A current Transformer Engine"
        advice.append(f"{whose} refuses {refused} payloads: set {GATE}=1. `precisionctl resume` does not need it.")
    if old := [payload for payload in read if payload.assumed]:
        lengths = sorted({payload.recipe.amax_history_len for payload in old})
        advice.append(
            f"{len(old)} payloads have no recipe. Transformer Engine 2.0 to 2.3 fails on them; from 2.4 on it takes "
            "DelayedScaling(), with a history of 1024 rows, whatever they had: here "
            f"{', '.join(map(str, lengths))}. `precisionctl convert --to megatron` writes them with their recipe."
        )
    if any(payload.gemms == 3 and len(payload.directions[0].scale) == 3 for payload in read):
        advice.append(
            "Attention's payloads beside current scaling have the softmax's columns alone, which Transformer Engine "
            "saves and does not load. --drop-fp8-state leaves them out."
        )
    if forms[_UNKNOWN]:
        advice.append(f"{forms[_UNKNOWN]} payloads are not understood; they are carried byte for byte.")
    return advice
