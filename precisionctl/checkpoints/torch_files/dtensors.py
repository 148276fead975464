"""PyTorch's DTensors in pickles: inert stand-ins for the classes that they name.

A rank pickles its local tensor, and beside it a spec: the shape of the whole, and for each dimension of the mesh of
ranks how the tensor is placed on it (torch/distributed/tensor/_dtensor_spec.py, of 2.4 to 2.15, in which the modules
moved). Of the mesh only the rank is needed: ranks are numbered in its order.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from precisionctl.errors import shown
from precisionctl.untrusted.safe_pickle import MOST_DIMENSIONS, is_count, itself, sizes


class Sharded:
    """Stands in for Shard: ranks have one piece each of dimension `dim`."""

    dim: object = None

    def __setstate__(self, state: Any) -> None:
        self.dim = state["dim"]


class Replicated:
    """Stands in for Replicate: ranks have the same."""

    def __setstate__(self, state: object) -> None:
        """A Replicate has no state."""


class _Described:
    """Stands in for what describes a DTensor; `fields` are what was pickled of it."""

    fields: object = None

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.fields = state


class RankShard(NamedTuple):
    """A rank's part of a tensor of this `shape`: `local` is all of it or, if it is `cut`, a run of rows. `rank` is that
    which saved it, None where nothing tells. It is a tuple because a pickle cannot modify a tuple that it has made."""

    local: Any
    shape: tuple[int, ...]
    cut: bool
    rank: int | None


def rebuilt(arguments: Any, state: Any) -> RankShard:
    """Stands in for torch._utils._rebuild_wrapper_subclass, with its arguments and the attributes that are set after
    it. Raises ValueError for a tensor that is cut in another way than by rows, once."""
    _, _, size, *_ = arguments
    attributes = state[1]
    spec = attributes["_spec"].fields
    placements = spec["placements"]
    if type(placements) not in (tuple, list) or len(placements) > MOST_DIMENSIONS:  # many tensors can share it
        raise ValueError(f"a DTensor placed as {shown(placements)}")
    cuts = [one for one in placements if type(one) is not Replicated]
    if len(cuts) > 1 or any(type(one) is not Sharded or type(one.dim) is not int or one.dim != 0 for one in cuts):
        raise ValueError(f"a DTensor placed as {shown(placements)}; only cuts by rows are read")
    # From torch 2.9 on a mesh tells the rank that pickled it, and before, one of a single dimension its place
    mesh = spec.get("mesh")
    told = mesh.fields if isinstance(mesh, _Described) and isinstance(mesh.fields, dict) else {}
    rank, place = told.get("_rank"), told.get("_coordinate_on_dim")
    if rank is None and isinstance(place, tuple | list) and len(place) == 1:
        rank = place[0]
    return RankShard(attributes["_local_tensor"], sizes(size), bool(cuts), rank if is_count(rank) else None)


def wrapper_subclass(*_: object) -> None:
    """Stands in for torch._utils._rebuild_wrapper_subclass, which is only named: `rebuilt` is called in its place."""
    raise ValueError("a DTensor without its attributes")


_NEW, _OLD = "torch.distributed.tensor", "torch.distributed._tensor"
STAND_INS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_wrapper_subclass"): wrapper_subclass,
    ("torch.serialization", "_get_layout"): itself,
    ("torch.distributed.device_mesh", "DeviceMesh"): _Described,
    ("torch.distributed._mesh_layout", "_MeshLayout"): _Described,
    ("torch.distributed._mesh_layout", "_FlatLayout"): _Described,
    **{(module, "DTensor"): _Described for module in (_NEW, f"{_NEW}._api", f"{_OLD}.api", _OLD)},
    **{
        (module, name): _Described
        for module in (f"{_NEW}._dtensor_spec", f"{_OLD}.placement_types")
        for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    },
    **{
        (f"{module}.placement_types", name): stand_in
        for module in (_NEW, _OLD)
        for name, stand_in in (("Shard", Sharded), ("Replicate", Replicated))
    },
}
"""(module, name) in a pickle -> what stands in for it."""
