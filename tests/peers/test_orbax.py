"""Orbax restores what the tests write, and what it saves is read: OCDBT and files, zarr 2 and 3, one chunk and many."""

import itertools
import subprocess
from pathlib import Path

import environments
import numpy as np
import orbax_files
import torch

from precisionctl.checkpoints.base import NO_HINTS
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint

SHAPES = {"params.params.a.kernel": (8, 3, 4, 6), "params.params.a.scale": (7,), "params.params.b": (10, 5)}


def test_both_read_what_the_other_writes(tmp_path: Path) -> None:
    state = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    np.savez(tmp_path / "state.npz", **{name: tensor.numpy() for name, tensor in state.items()})
    for form, ocdbt, zstd, shards in itertools.product((2, 3), (True, False), (True, False), (True, False)):
        name = f"{form}-{'ocdbt' if ocdbt else 'files'}-{zstd}-{shards}"
        how = {"form": form, "ocdbt": ocdbt, "zstd": zstd, "sharded": shards}
        orbax_files.write(tmp_path / "written" / name, state, use_ocdbt=ocdbt, use_zarr3=form == 3, **how)
    program = Path(__file__).parent / "orbax_save.py"
    done = subprocess.run([environments.orbax(), program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    saved = sorted((tmp_path / "saved").iterdir())
    assert len(saved) == 20
    for directory in saved:
        reader = open_checkpoint(directory, hints=NO_HINTS)
        assert reader.container == "orbax"
        for name, tensor in state.items():
            found = read_tensor(reader, name.removeprefix("params.params."))
            assert torch.equal(found.view(tensor.shape), tensor.to(found.dtype)), (directory.name, name)
