"""A plan whose result has torchtitan's names: what its models save, with rows in its order."""

from dataclasses import replace

from precisionctl.architectures.head_rearrangements import QKV, RotaryPairs
from precisionctl.architectures.rearrangements import SAME
from precisionctl.checkpoints.other_trainers.torchtitan_families import FAMILIES
from precisionctl.errors import MappingError
from precisionctl.param import STATE, TensorSpec, kind_and_parameter, state_name
from precisionctl.planning.plan import Job, Plan


def with_torchtitan_names(plan: Plan) -> Plan:
    """The plan of a state dict, under torchtitan's names. Where its queries and keys have rotary pairs in neighbouring
    rows, so have these. Moments of attention are of one tensor, as all of torchtitan's own configs have it
    (`fuse_qkv`). Copies that it has no name for are left out.

    Raises MappingError for a family that torchtitan does not have, and for a tensor that its family has not.
    """
    family, model = FAMILIES.get(plan.model.architecture), plan.model
    if family is None or not family.current or model.wrapper:
        known = ", ".join(name for name, each in FAMILIES.items() if each.current)
        what = f"torchtitan's names are known of {known}, and this is a {model.model_type}"
        raise MappingError(what, do="Write --to hf, which torchtitan loads with --checkpoint.initial_load_in_hf.")
    jobs, targets = list[Job](), dict[str, TensorSpec]()
    for job in plan.jobs:
        row, count = job.row, len(job.row.hf)
        specs = dict[str, TensorSpec]()
        for index, name in enumerate(job.writes):
            kind, parameter = kind_and_parameter(name)
            found = family.titan_name(parameter if kind else name, model)
            if found is not None:
                specs[state_name(kind, found) if kind else found] = plan.targets[name]
            elif index < count:
                do = "Write --to dcp, or --to hf."
                raise MappingError(f"torchtitan's {model.architecture} has no `{name}`", do=do)
        if row.rearrangement == QKV:
            if job.name.startswith(STATE):
                first = next(iter(specs))
                inside, _, last = first.rpartition(".")
                row = replace(row, names=row.hf[:1], rearrangement=SAME)
                # the name that moments of queries, keys and values have together
                specs = {f"{inside[:-1]}qkv.{last}": replace(specs[first], shape=row.shapes(model, "hf")[0])}
            turned = RotaryPairs(row.rearrangement) if family.pairs else row.rearrangement  # which changes no shape
            row = replace(row, rearrangement=turned, as_stored=job.row.source)
        jobs.append(replace(job, row=row, writes=tuple(specs)))
        targets |= specs
    return replace(plan, jobs=tuple(jobs), targets=targets)
