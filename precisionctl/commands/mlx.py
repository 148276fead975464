"""The target of `export-inference` that is a directory of mlx-lm's, for Macs (also LM Studio)."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from precisionctl.checkpoints.base import packings_of
from precisionctl.checkpoints.config_json import config_dtype
from precisionctl.checkpoints.mlx_config import DENSE_FIRST, words_of_mlx
from precisionctl.checkpoints.mlx_names import RENAMED
from precisionctl.codes.mlx_groups import MlxGroups
from precisionctl.commands.build import Result
from precisionctl.commands.request import Mlx
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import source_notes
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, UnknownArchitecture, shown
from precisionctl.export.mlx_plan import in_mlx
from precisionctl.export.model_card import Card, path_in_command
from precisionctl.model_shape import ModelShape
from precisionctl.planning.plan import Plan
from precisionctl.quant_methods.mxfp4 import BLOCKS_OF_16
from precisionctl.sizes import counted
from precisionctl.untabled_model import UntabledModel

TITLE = "mlx-lm"


def for_mlx(kind: Mlx, source: Source, destination: Path) -> Result:
    """A result that is a directory as `mlx_lm.convert` makes one. Raises UnknownArchitecture for a model that mlx-lm
    does not load, or of which it is not known what it changes."""
    reader, model = source.reader, source.plan.model
    check_loaded(model)
    of_values = DType.float16 if config_dtype(source.plan.targets) == DType.float16.value else DType.bfloat16
    scheme = kind.scheme or ("f16" if of_values is DType.float16 else "bf16")
    dtype = {"bf16": DType.bfloat16, "f16": DType.float16}.get(scheme, of_values)
    codes = {name for name, packing in packings_of(reader).items() if packing.name == BLOCKS_OF_16.name}
    plan = in_mlx(source.plan, scheme, dtype, codes)
    quantized = [name for name, spec in plan.targets.items() if isinstance(spec.packing, MlxGroups)]
    if scheme not in ("bf16", "f16") and not quantized:
        what = f"no weight of this model has whole groups of --scheme {scheme}"
        raise PrecisionError(what, do="Choose --scheme bf16.")
    run = f"mlx_lm.generate --model {shlex.quote(str(destination))} --prompt hello"
    notes = [
        *source_notes(source),
        *_notes(source.plan, plan, dtype),
        *(_NOTE_OF_CODES if codes and scheme in ("bf16", "f16") else ()),
        f"Run it on a Mac with: {run}",
    ]
    matrices = (name for name, spec in plan.targets.items() if len(spec.shape) > 1 and name.endswith(".weight"))
    card = Card(
        name=destination.name,
        title=TITLE,
        tag="mlx",
        command=f"mlx_lm.generate --model {path_in_command(destination.name)} --prompt hello",
        facts={"weights": scheme},
        quantized=quantized or [name for name in plan.targets if name.endswith(".weight")],
        kept=[name for name in matrices if name not in quantized] if quantized else [],
        base_model=kind.base_model,
        codes=scheme.replace("bit", "-bit") if scheme in ("4bit", "8bit") else scheme.upper(),
    )
    return Result(plan, notes, card=card, mlx=words_of_mlx(model, dtype))


_NOTE_OF_CODES = ("The MXFP4 codes of this model are decoded; --scheme mxfp4 keeps them as they are.",)


def check_loaded(model: ModelShape) -> None:
    """Raise UnknownArchitecture for a model that mlx-lm does not load as it is, or was not seen to."""
    name = model.model_type
    if isinstance(model, UntabledModel) or model.wrapper or name not in RENAMED:
        what = f"what mlx-lm stores of a {shown(name)} is not known here"
    elif why := _why_not_loaded(model):
        what = f"mlx-lm has no {name} with {why}, as this model has"
    else:
        return
    raise UnknownArchitecture(
        what, do="--target llama.cpp may have it. docs/mlx.md names the families that are written."
    )


_ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2", "lfm2", "lfm2_moe")
_NEVER_TIED = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss"),
    *("kimi_k2", "nemotron_h", "phi", "phimoe", "qwen2_moe", "solar_open", "stablelm"),
)


def _why_not_loaded(model: ModelShape) -> str | None:
    """What mlx-lm's class of the family does not have, in words (models/*.py)."""
    name, with_experts = model.model_type, model.moe.layer_freq if model.moe else ()
    found = {
        "a head of its own": name in _ALWAYS_TIED and model.untied_embeddings,
        "its embedding as the head": name in _NEVER_TIED and model.tied_embeddings,
        "layers without experts": name in ("mellum", "qwen2_moe") and not all(with_experts),
        "layers without experts behind others": name in DENSE_FIRST and with_experts != tuple(sorted(with_experts)),
        "rotary embeddings that are not scaled": name in ("deepseek_v2", "minicpm3") and not model.rope_scaling,
        "layers that share an indexer": bool(model.dsa) and not all(model.dsa.layers if model.dsa else ()),
        "keys of each head": name == "gpt_bigcode" and model.num_query_groups > 1,
        "gates of single channels": name == "laguna" and model.linear_gate == "softplus per element",
        "heads of this size": name in ("helium", "internlm3") and model.projection_size != model.hidden_size,
    }
    return next((why for why, there in found.items() if there), None)


def _computed_otherwise(model: ModelShape) -> Iterator[str]:
    """What mlx-lm 0.32 computes otherwise than transformers, whoever made the directory, in words."""
    name, scaling = model.model_type, model.rope_scaling or {}
    if name == "glm" and model.rotary_percent != 1:
        yield "all channels of heads are turned"
    if name == "jamba" and model.moe:
        yield "the weights of experts are a softmax over those chosen alone"
    if name in ("mamba2", "granitemoehybrid") and model.mamba and model.mamba.num_groups > 1:
        yield "the output of a mixer is normalised over all groups"
    if name == "phi3" and scaling:
        yield "rotary embeddings are those of long texts for short ones too"
    if name == "gpt_oss" and scaling.get("truncate") is False:
        yield "the bounds between which YaRN blends frequencies are rounded"


def _notes(before: Plan, plan: Plan, dtype: DType) -> Iterator[str]:
    if others := list(_computed_otherwise(plan.model)):
        yield f"mlx-lm computes a little otherwise than transformers, with every directory of this model: {others[0]}."
    if any(job.row.of_prediction for job in before.jobs):
        yield "mlx-lm has no layers of multi-token prediction: those of this model are not written."
    wide = sum(spec.dtype == DType.float32 for spec in before.targets.values())
    kept = sum(spec.dtype == DType.float32 for spec in plan.targets.values())
    if wide > kept:
        yield f"{counted(wide - kept, 'tensor')} in FP32 are {dtype} here, as mlx-lm makes all values of one dtype."
