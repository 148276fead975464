"""A plan whose result has torchtitan's names: what its Llama saves, with rows in its order."""

from dataclasses import replace

from precisionctl.architectures.head_rearrangements import QKV, RotaryPairs
from precisionctl.architectures.rearrangements import SAME
from precisionctl.checkpoints.dcp.torchtitan import fused_name, torchtitan_name
from precisionctl.errors import MappingError
from precisionctl.param import STATE, TensorSpec, kind_and_parameter, state_name
from precisionctl.planning.plan import Job, Plan


def with_torchtitan_names(plan: Plan) -> Plan:
    """The plan of a Llama's state dict, under torchtitan's names. Queries and keys have rotary pairs in neighbouring
    rows. Moments of attention are of one tensor, as all of torchtitan's own configs have it (`fuse_qkv`).

    Raises MappingError for any other model, and for a Llama with biases.
    """
    if plan.model.architecture != "llama":
        what = f"torchtitan's names are known of its Llama alone, and this is a {plan.model.architecture}"
        raise MappingError(what, do="Write --to hf, which torchtitan loads with --checkpoint.initial_load_in_hf.")
    jobs, targets = list[Job](), dict[str, TensorSpec]()
    for job in plan.jobs:
        row, writes = job.row, tuple(_torchtitan_name(name) for name in job.writes)
        has_pairs = row.rearrangement == QKV
        if has_pairs and job.name.startswith(STATE):
            fused = tuple(dict.fromkeys(fused_name(name) for name in writes))
            row, writes = replace(row, names=row.hf[:1], rearrangement=SAME), fused
        shapes = row.shapes(plan.model, "hf") * 2  # a tied tensor is there twice
        if has_pairs:  # which changes no shape
            row = replace(row, rearrangement=RotaryPairs(row.rearrangement), as_stored=job.row.source)
        jobs.append(replace(job, row=row, writes=writes))
        count = len(writes)
        for new, old, shape in zip(writes, job.writes[:count], shapes[:count], strict=True):
            targets[new] = replace(plan.targets[old], shape=shape)
    return replace(plan, jobs=tuple(jobs), targets=targets)


def _torchtitan_name(name: str) -> str:
    """torchtitan's name of a weight, or of a weight's optimizer state."""
    kind, parameter = kind_and_parameter(name)
    return state_name(kind, torchtitan_name(parameter)) if kind else torchtitan_name(name)
