"""An export held against the rules of what it is for: an inference engine, Transformer Engine, llama.cpp or mlx-lm."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.hints import open_hinted
from precisionctl.commands.request import LLAMA_CPP, OTHER_TARGETS, TE, check_expert_parallel, given_options
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import MappingError, PrecisionError, RecipeError, UnknownArchitecture
from precisionctl.param import Layout
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.verify.engine_rules import NO_CODES, check
from precisionctl.verify.llama_cpp_rules import check_llama_cpp
from precisionctl.verify.mlx_rules import check_mlx
from precisionctl.verify.te_rules import check_te


@dataclass(frozen=True)
class TargetCheck:
    """The rules that a directory breaks, and the name of whose rules they are."""

    title: str
    findings: Sequence[Finding]

    @property
    def passes(self) -> bool:
        """Whether the target would load the directory, read it rightly, and find codes in it."""
        return not any(finding.rule.fatal or finding.rule is NO_CODES for finding in self.findings)


def check_directory(
    path: Path, target: str, ranks: int, *, expert_parallel: bool, reference: Path | None
) -> TargetCheck:
    """The rules of `target`, an engine's name or one of OTHER_TARGETS, that a directory or a file breaks, served on
    `ranks` GPUs, with experts whole if `expert_parallel`. A `reference` describes a file that does not do so itself.

    Raises RecipeError for an unknown target, for these three on several GPUs, for experts on one GPU, and for codes
    that are not read here: that says nothing of whether the target loads them. Raises UnknownFormat for what is no such
    directory or file, and UnknownArchitecture where the rules need a table that is not there.
    """
    try:
        reader = open_hinted(path, reference=reference)
    except PrecisionError as error:
        raise RecipeError(f"{error.what}, so nothing was checked", where=error.where, do=error.do) from error
    # By Megatron's names for TE, since `te.load_te` finds state by them. Made once, and where it is first asked for, as
    # `check_te` refuses other containers before
    planned = cache(partial(_planned, reader, "megatron" if target == TE else "hf"))
    title = OTHER_TARGETS.get(target)
    if title is None:
        engine = engine_named(target, *OTHER_TARGETS)
        check_expert_parallel(expert_parallel, ranks)
        title, found = engine.title, check(reader, engine, ranks, expert_parallel=expert_parallel)
    elif given := given_options({"--tp": ranks > 1, "--expert-parallel": expert_parallel}):
        raise RecipeError(f"{given} cannot be given for {title}", do="Leave it out.")
    elif target == TE:
        found = check_te(reader, planned)
    else:
        found = check_llama_cpp(reader) if target == LLAMA_CPP else check_mlx(reader)
    of_any: list[Finding] = []
    if isinstance(reader, HuggingFaceReader) and reader.wrapped:  # a model is read here by such names too
        what = "named as in a module of torch.compile, FSDP, DDP or PEFT"
        of_any.append(Finding(reader.wrapped, what, _OWN_NAMES))
    if isinstance(plan := planned(), Finding):
        of_any.append(plan)
    return TargetCheck(title, [*of_any, *found])


def _planned(reader: Reader, layout: Layout) -> Plan | Finding:
    """The plan to this layout, or that the tensors are not the model's. Raises UnknownArchitecture where no table says
    what they should be."""
    try:
        return make_plan(reader, layout)
    except UnknownArchitecture:
        raise
    except MappingError as error:  # whose list of tensors has several lines, and a finding one
        return Finding("tensors", "; ".join(" ".join(line.split()) for line in error.what.splitlines()), _WHOLE)


_OWN_NAMES = EngineRule(
    "tensors have the names that the model's class gives them, without those of modules around it: `convert --to hf` "
    "leaves them out",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)

_WHOLE = EngineRule(
    "all tensors of the model are there, in its shapes, as far as a table of its family knows them",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)
