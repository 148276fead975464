"""The target of `export-inference` that is a directory of mlx-lm's, for Macs (also LM Studio)."""

import shlex

from precisionctl.checkpoints.base import packings_of
from precisionctl.checkpoints.hf_directory.config_json import config_dtype
from precisionctl.checkpoints.mlx.mlx_config import words_of_mlx
from precisionctl.checkpoints.mlx.mlx_models import check_loaded, computed_otherwise
from precisionctl.codes.mlx_groups import MlxGroups
from precisionctl.commands.build import Result
from precisionctl.commands.notes import lower_scheme_note, rounded_notes
from precisionctl.commands.request import MLX, OTHER_TARGETS
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import source_notes
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError
from precisionctl.export.mlx_plan import in_mlx
from precisionctl.export.model_card import Card, path_in_command
from precisionctl.quant_methods.mxfp4 import BLOCKS_OF_16
from precisionctl.sizes import counted


def for_mlx(source: Source) -> Result:
    """A result that is a directory as `mlx_lm.convert` makes one. Raises UnknownArchitecture for a model that mlx-lm
    does not load, or of which it is not known what it changes."""
    request, reader, model = source.request, source.reader, source.plan.model
    check_loaded(model)
    of_values = DType.float16 if config_dtype(source.plan.targets) == DType.float16.value else DType.bfloat16
    scheme = request.mlx_scheme or ("f16" if of_values is DType.float16 else "bf16")
    dtype = {"bf16": DType.bfloat16, "f16": DType.float16}.get(scheme, of_values)
    codes = {name for name, packing in packings_of(reader).items() if packing.name == BLOCKS_OF_16.name}
    plan = in_mlx(source.plan, scheme, dtype, codes)
    quantized = [name for name, spec in plan.targets.items() if isinstance(spec.packing, MlxGroups)]
    if scheme not in ("bf16", "f16") and not quantized:
        what = f"no weight of this model has whole groups of --scheme {scheme}"
        raise PrecisionError(what, do="Choose --scheme bf16.")

    notes = [*source_notes(source)]
    if wrapper := model.wrapper:
        number = counted(len(source.plan.towers.targets), "tensor")
        notes.append(f"mlx-lm has the text model of this {wrapper.model_type}. Its towers, {number}, are not written.")
    if others := "; ".join(computed_otherwise(model)):
        notes.append(
            f"mlx-lm computes a little otherwise than transformers, with every directory of this model: {others}."
        )
    if any(job.row.of_prediction for job in source.plan.jobs):
        notes.append("mlx-lm has no layers of multi-token prediction: those of this model are not written.")
    notes += rounded_notes(reader, plan)
    if codes and scheme in ("bf16", "f16"):
        notes.append(lower_scheme_note(BLOCKS_OF_16.name, "mxfp4"))
    run = f"mlx_lm.generate --model {shlex.quote(str(request.destination))} --prompt hello"
    notes.append(f"Run it on a Mac with: {run}")

    matrices = (name for name, spec in plan.targets.items() if len(spec.shape) > 1 and name.endswith(".weight"))
    card = Card(
        name=request.destination.name,
        title=OTHER_TARGETS[MLX],
        tag="mlx",
        command=f"mlx_lm.generate --model {path_in_command(request.destination.name)} --prompt hello",
        facts={"weights": scheme},
        quantized=quantized or [name for name in plan.targets if name.endswith(".weight")],
        kept=[name for name in matrices if name not in quantized] if quantized else [],
        base_model=request.base_model,
        codes=scheme.replace("bit", "-bit") if scheme in ("4bit", "8bit") else scheme.upper(),
    )
    return Result(plan, notes, card=card, mlx=words_of_mlx(model, dtype))
