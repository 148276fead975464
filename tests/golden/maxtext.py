"""Writes the golden files in `maxtext/`: states of MaxText with scanned layers, and what it makes of them itself for
Hugging Face.

    PYTHONPATH=MAXTEXT/src/maxtext/checkpoint_conversion/utils python maxtext.py HF_DIRS

It needs orbax-checkpoint and safetensors. In HF_DIRS is a directory for each of FAMILIES, as tests/helpers/pico.py
saves it with the sizes in tests/checkpoints/test_maxtext.py, for its config and the shapes of its tensors. `stored` are
random numbers, `expected` what the hooks of MaxText's `param_mapping.py` (of 22 August 2026) make of them, slice by
slice as its `utils.py` does (process_maxtext_param). The state of the first is also saved by Orbax 0.12.8, on four
devices.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from param_mapping import HOOK_FNS, PARAM_MAPPING
from safetensors import safe_open
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "maxtext"
FAMILIES = {
    "llama-3": "llama3.1-8b",
    "qwen2": "qwen2.5-7b",
    "qwen3-moe": "qwen3-30b-a3b",
    "mixtral": "mixtral-8x7b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
    "deepseek-v3": "deepseek3-671b",
    "olmo3": "olmo3-7b",
}
PADDED = ("qwen2", "gemma2", "gemma3", "olmo3")
"""Families whose hooks leave out rows behind the vocabulary."""


def stored_shape(key: str, shape: list[int], config: dict[str, Any], padding: int) -> tuple[int, ...]:
    """The shape that MaxText has a parameter in, of one layer and expert, with Hugging Face's."""
    heads, size = config["num_attention_heads"], config["head_dim"]
    *_, module, kind = key.split("-")
    module = module.removesuffix("_local").removesuffix("_global")
    if kind == "embedding":
        return (shape[0] + padding, shape[1])
    if len(shape) == 1:
        return (shape[0] // size, size) if kind == "bias" and module != "gate" else tuple(shape)
    if module in ("query", "key", "value") and "kv_lora_rank" not in config:
        return (shape[1], shape[0] // size, size)
    if module in ("query", "wq_b", "wkv_b"):
        return (shape[1], heads, shape[0] // heads)
    if module == "out":
        return (heads, shape[1] // heads, shape[0])
    return (shape[1], shape[0])


def states(family: str, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What MaxText stores, with dots in the names, and what it makes of that."""
    config = json.loads((directory / "config.json").read_text())
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    with safe_open(directory / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    of_maxtext = SimpleNamespace(
        num_experts=config.get("num_local_experts"),
        head_dim=config["head_dim"],
        inhomogeneous_layer_cycle_interval=4,
    )
    given = {"text_config": config, "vision_config": {"num_hidden_layers": 0}} if family == "gemma3" else config
    hooks = HOOK_FNS[FAMILIES[family]](given, of_maxtext, True, saving_to_hf=True)
    random, stored, expected = np.random.default_rng(0), {}, {}

    def converted(key: str, value: Any, name: str) -> None:
        chain = hooks.get(key) or []
        for hook in chain if isinstance(chain, list) else [chain]:
            value = hook(value, shapes[name])
        expected[name] = np.asarray(value).astype(ml_dtypes.bfloat16).reshape(shapes[name])

    for key, paths in PARAM_MAPPING[FAMILIES[family]](given, of_maxtext, True).items():
        names = np.char.replace(np.array(paths), "model.language_model.", "model.")
        if names.flat[0] not in shapes:
            continue
        axes = {0: (), 1: (1,), 2: (0, 1)}[names.ndim]
        shape = list(stored_shape(key, shapes[names.flat[0]], config, 6 if family in PADDED else 0))
        for axis, size in zip(axes, names.shape, strict=True):
            shape.insert(axis, size)
        value = jnp.asarray(random.standard_normal(shape).astype(ml_dtypes.bfloat16))
        stored[key.removeprefix("params-").replace("-", ".")] = value
        for at in np.ndindex(names.shape):
            part = value
            for axis, number in reversed([*zip(axes, at, strict=True)]):
                part = jax.lax.index_in_dim(part, number, axis=axis, keepdims=False)
            converted(key, part, str(names[at]))
    return stored, expected


def save_by_orbax(directory: Path, stored: dict[str, Any]) -> None:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))

    def sharded(value: Any) -> Any:
        axis = next((one for one, size in enumerate(value.shape) if size % 4 == 0), None)
        spec = PartitionSpec(*(["fsdp" if one == axis else None for one in range(value.ndim)]))
        return jax.device_put(value, NamedSharding(mesh, spec))

    tree: dict[str, Any] = {}
    for name, value in stored.items():
        *above, last = name.split(".")
        inside = tree
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = sharded(value)
    state = {"params": {"params": tree}, "step": jnp.asarray(7, jnp.int32)}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    manager = ocp.CheckpointManager(directory, item_names=("items",), item_handlers={"items": handler}, options=options)
    manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(item=state)))
    manager.wait_until_finished()
    for pattern in ("_sharding", "array_metadatas/process_0", "commit_success.txt"):  # which nothing here reads
        for file in directory.rglob(pattern):
            file.unlink()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        stored, expected = states(family, Path(sys.argv[1]) / family)
        save_file({name: np.asarray(one) for name, one in stored.items()}, FOLDER / f"{family}-stored.safetensors")
        save_file(expected, FOLDER / f"{family}-expected.safetensors")
        if family == "llama-3":
            save_by_orbax(FOLDER.resolve() / "orbax", stored)
