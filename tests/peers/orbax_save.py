"""Run with Orbax: restore what is in a folder, and save it again in each of the forms that Orbax has.

    python orbax_save.py FOLDER

`FOLDER/state.npz` are arrays by names with dots, in FP32. Each directory of `FOLDER/written` must hold them. Into
`FOLDER/saved` come states in FP32 and BF16, sharded over four devices.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FOLDER = Path(sys.argv[1]).resolve()
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
SMALL = 64
"""Bytes of a chunk."""


def tree(arrays: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in arrays.items():
        *above, last = name.split(".")
        inside = found
        for key in above:
            inside = inside.setdefault(key, {})
        inside[last] = value
    return found


def sharded(value: np.ndarray, dtype: Any) -> jax.Array:
    axes = iter(("x", "y"))
    spec = PartitionSpec(*(next(axes, None) if size % 2 == 0 else None for size in value.shape))
    return jax.device_put(jnp.asarray(value, dtype), NamedSharding(MESH, spec))


def save(directory: Path, state: Any, chunk: int, ocdbt: bool, zarr3: bool) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    manager = ocp.CheckpointManager(directory, item_names=("items",), item_handlers={"items": handler}, options=options)
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk), state)
    item = ocp.args.PyTreeSave(item=state, save_args=args, ocdbt_target_data_file_size=chunk if ocdbt else None)
    manager.save(3, args=ocp.args.Composite(items=item))
    manager.wait_until_finished()


arrays = dict(np.load(FOLDER / "state.npz"))
for directory in sorted((FOLDER / "written").iterdir()):
    restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree(arrays))
    form, place, *_ = directory.name.split("-")
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=place == "ocdbt", use_zarr3=form == "3"))
    found = reader.restore(directory, args=ocp.args.PyTreeRestore(restore_args=restore))
    jax.tree.map(np.testing.assert_array_equal, found, tree(arrays))
for dtype in (jnp.float32, jnp.bfloat16):
    state = tree({name: sharded(value, dtype) for name, value in arrays.items()})
    name = jnp.dtype(dtype).name
    for ocdbt in (True, False):
        for zarr3 in (True, False):
            for chunk in (SMALL, 1 << 31):
                save(FOLDER / "saved" / f"{name}-{ocdbt}-{zarr3}-{chunk}", state, chunk, ocdbt, zarr3)
    with ocp.StandardCheckpointer() as standard:
        standard.save(FOLDER / "saved" / f"{name}-standard", state)
    ocp.PyTreeCheckpointer().save(FOLDER / "saved" / f"{name}-pytree", state)
