"""An export held against the rules of what it is for: an inference engine, Transformer Engine, llama.cpp or mlx-lm."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.hints import open_hinted
from precisionctl.commands.request import LLAMA_CPP, OTHER_TARGETS, TE, check_expert_parallel, given_options
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import MappingError, PrecisionError, RecipeError
from precisionctl.planning.make_plan import make_plan
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
    directory or file.
    """
    try:
        reader = open_hinted(path, reference=reference)
    except PrecisionError as error:
        raise RecipeError(f"{error.what}, so nothing was checked", where=error.where, do=error.do) from error
    engine = None if target in OTHER_TARGETS else engine_named(target, *OTHER_TARGETS)
    title = engine.title if engine else OTHER_TARGETS[target]
    if engine:
        check_expert_parallel(expert_parallel, ranks)
    elif given := given_options({"--tp": ranks > 1, "--expert-parallel": expert_parallel}):
        raise RecipeError(f"{given} cannot be given for {title}", do="Leave it out.")
    found: list[Finding] = []
    if isinstance(reader, HuggingFaceReader) and reader.wrapped:  # inside of which a model is read here
        found.append(Finding(reader.wrapped, "named as in a module of torch.compile, FSDP, DDP or PEFT", _OWN_NAMES))
    plan = None
    try:
        plan = make_plan(reader, "megatron" if target == TE else "hf")  # by Megatron's names `load_te` finds state
    except MappingError as error:
        found.append(Finding("tensors", "; ".join(" ".join(line.split()) for line in error.what.splitlines()), _WHOLE))
    if engine:
        found += check(reader, engine, ranks, expert_parallel=expert_parallel)
    elif target == TE:
        found += check_te(reader, plan)
    else:
        found += check_llama_cpp(reader) if target == LLAMA_CPP else check_mlx(reader)
    return TargetCheck(title, found)


_OWN_NAMES = EngineRule(
    "tensors have the names that the model's class gives them, without those of modules around it: `convert --to hf` "
    "leaves them out",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)

_WHOLE = EngineRule(
    "all tensors of the model are there, in its shapes, as far as a table of its family knows them",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)
