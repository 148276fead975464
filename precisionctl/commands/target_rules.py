"""An export held against the rules of what it is for: an inference engine, Transformer Engine, llama.cpp or mlx-lm."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.hinted_path import HintedPath, open_hinted
from precisionctl.commands.request import LLAMA_CPP, MLX, OTHER_TARGETS, TE, check_expert_parallel, given_options
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import MappingError, PrecisionError, RecipeError
from precisionctl.planning.make_plan import make_plan
from precisionctl.verify import llama_cpp_rules, mlx_rules, te_rules
from precisionctl.verify.engine_rules import NO_CODES, check


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
        reader = open_hinted(HintedPath(path, reference=reference))
    except PrecisionError as error:
        raise RecipeError(f"{error.what}, so nothing was checked", where=error.where, do=error.do) from error
    if target not in OTHER_TARGETS:
        engine = engine_named(target, *OTHER_TARGETS)
        check_expert_parallel(expert_parallel, ranks)
        found = check(reader, engine, ranks, expert_parallel=expert_parallel)
        return TargetCheck(engine.title, [*_of_any_target(reader), *found])
    title = OTHER_TARGETS[target]
    if given := given_options({"--tp": ranks > 1, "--expert-parallel": expert_parallel}):
        raise RecipeError(f"{given} cannot be given for {title}", do="Leave it out.")
    return TargetCheck(title, [*_of_any_target(reader), *_CHECKS[target](reader)])


_OWN_NAMES = EngineRule(
    "tensors have the names that the model's class gives them, without those of modules around it: `convert --to hf` "
    "leaves them out",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)


_WHOLE = EngineRule(
    "all tensors of the model are there, in its shapes, as far as a table of its family knows them",
    "vLLM 0.33 model_executor/models/utils.py AutoWeightsLoader; transformers 5.24 modeling_utils.py from_pretrained",
)


def _of_any_target(reader: Reader) -> Iterator[Finding]:
    """What no target loads: names inside of a wrapper's, by which a model is read here, and a model that lacks a
    part."""
    if isinstance(reader, HuggingFaceReader) and reader.wrapped:
        yield Finding(reader.wrapped, "named as in a module of torch.compile, FSDP, DDP or PEFT", _OWN_NAMES)
    try:
        make_plan(reader, "hf", naming="as stored")
    except MappingError as error:
        yield Finding("tensors", error.what, _WHOLE)


_CHECKS: Mapping[str, Callable[[Reader], Sequence[Finding]]] = {
    TE: te_rules.check_te,
    LLAMA_CPP: llama_cpp_rules.check_llama_cpp,
    MLX: mlx_rules.check_mlx,
}
"""What the targets that are no engine ask."""
