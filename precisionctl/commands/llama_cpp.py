"""The target of `export-inference` that is one file, or two where there are towers: llama.cpp, and what is built on it
(Ollama, LM Studio)."""

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from precisionctl.checkpoints.base import Reader, packings_of
from precisionctl.checkpoints.gguf.families import of_llama_cpp
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.file_types import FILE_TYPES, MIXTURES, GgufType, ValuesType
from precisionctl.checkpoints.gguf.global_scales import scale_tensors
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue, Metadata
from precisionctl.checkpoints.gguf.rope_keys import BETAS, BEYOND_CONTEXT
from precisionctl.checkpoints.gguf.rotary_tensors import rotary_tensors
from precisionctl.checkpoints.gguf.towers.mmproj_file import is_mmproj
from precisionctl.checkpoints.gguf.writer import GgufContents
from precisionctl.checkpoints.hf_directory.companions import LICENCE
from precisionctl.checkpoints.hf_directory.config_json import made_config
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.ggml_blocks import BlocksInRows
from precisionctl.commands.build import Result
from precisionctl.commands.mmproj import Mmproj, mmproj_of
from precisionctl.commands.notes import lower_scheme_note
from precisionctl.commands.request import LLAMA_CPP, OTHER_TARGETS, Request
from precisionctl.commands.source import Source
from precisionctl.commands.source_notes import source_notes
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, UnknownArchitecture, shown
from precisionctl.export.gguf.gguf_plan import KEPT, GgufPlan, in_gguf, type_of_values
from precisionctl.export.gguf.gguf_tokenizer import tokenizer_metadata
from precisionctl.export.model_card import NAME, Card, path_in_command
from precisionctl.export.weight_encodings import stored_weight_encodings
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.text_config import config_parts
from precisionctl.param import TensorSpec, stack_and_slice
from precisionctl.planning.plan import Plan
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_json import parse_json


def for_llama_cpp(source: Source) -> Result:
    """A result that is a GGUF file in the destination, beside a card and licences, and the file of a wrapper's towers.

    Raises UnknownArchitecture for a model that llama.cpp does not compute, PrecisionError or CheckpointError for a
    tokenizer that it has not, UnmappedTensor.
    """
    request, model, reader = source.request, source.plan.model, source.reader
    destination = request.destination
    if is_mmproj(destination):
        what = f"llama.cpp takes {shown(destination.name)} for towers, as mmproj is in the name"
        raise PrecisionError(what, do="Choose another name for the result.")
    family = of_llama_cpp(model)  # first, as no type and no tokenizer would help
    of_values = type_of_values(source.plan)
    type_ = request.gguf_type or of_values
    codes = _Codes.of(reader)
    gguf = codes.kept_in(source.plan, type_)
    about = partial(_about, request, reader)
    config = _config(reader, model)
    if family.images:
        family.images.check(config)
    tokenizer, tokenizer_notes = tokenizer_metadata(
        reader.companions.files,
        config,
        model.vocab_size,
        reader.path or "",
        family.tokens,
        sentencepiece=family.sentencepiece,
    )
    metadata: dict[str, GgufValue] = {
        "general.architecture": family.architecture,
        "general.type": "model",
        **about(gguf.plan),
        **family.metadata(model, FILE_TYPES[type_]),
        "general.quantization_version": np.uint32(2),
        **codes.inputs_as_they_are(gguf.kept, type_),
        **tokenizer,
    }
    name = f"{destination.name}-{type_.upper()}.gguf"
    of_towers = type_ if type_ == "bf16" or type_ == "f16" else of_values
    mmproj, tower_notes = _towers(source, f"mmproj-{destination.name}-{of_towers.upper()}.gguf", of_towers, about)
    names, options = [name, *([mmproj.contents.name] if mmproj else [])], _options(model, family)
    notes = [
        *source_notes(source),
        *tower_notes,
        *_notes_of_the_model(model, family, options),
        *codes.notes(type_, family, set(gguf.kept.values())),
        *tokenizer_notes,
        *(_FEWER_BITS if type_ in ("bf16", "f16") else ()),
        f"Run it with: {_run(shlex.quote(str(destination)), names, options)}",
    ]
    quantized = type_ in MIXTURES
    of_main_type, others = _of_main_type(gguf.plan, mmproj.plan if mmproj else None, KEPT.get(type_), quantized)
    card = Card(
        name=destination.name,
        title=OTHER_TARGETS[LLAMA_CPP],
        tag="gguf",
        command=_run(path_in_command(destination.name), names, options),
        facts={"weights": type_.upper(), "file": name, **({"towers": mmproj.contents.name} if mmproj else {})},
        quantized=of_main_type,
        kept=others,
        base_model=request.base_model,
        codes=type_.upper(),
    )
    scales = codes.global_scales(gguf.kept, type_) | rotary_tensors(model)
    plan, files = gguf.plan, [GgufContents(name, metadata, gguf.plan.targets, scales, quantized)]
    if mmproj:
        plan = replace(plan, jobs=plan.jobs + mmproj.plan.jobs, targets={**plan.targets, **mmproj.plan.targets})
        files.append(mmproj.contents)
    licences = {file: data for file, data in reader.companions.files.items() if LICENCE.has(file)}
    return Result(plan, notes, gguf=files, beside={**licences, NAME: card.text(reader)})


def _about(request: Request, reader: Reader, plan: Plan) -> dict[str, GgufValue]:
    """What the file of a plan says of its name, its size, and how the model is sampled from."""
    said = reader.companions.files.get("generation_config.json")
    config = parse_json(said, "generation_config.json") if said is not None else {}
    about: dict[str, GgufValue] = {}
    for key, name in _SAMPLING.items():
        value = config.get(name)
        if isinstance(value, int | float) and abs(value) < 1 << 30:
            about[f"general.sampling.{key}"] = np.float32(value) if key != "top_k" else np.int32(int(value))

    about["general.name"] = (request.base_model or request.destination.name).rpartition("/")[2]
    about["general.size_label"] = _size_label(plan)
    if request.base_model is not None:  # the model on the Hub that the source is
        organization, _, model = request.base_model.partition("/")
        about |= {
            "general.base_model.count": np.uint32(1),
            "general.base_model.0.name": model,
            "general.base_model.0.organization": organization,
            "general.base_model.0.repo_url": f"https://huggingface.co/{request.base_model}",
        }
    return about


_SAMPLING = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}
"""The settings of generation_config.json that llama.cpp takes for those of the model."""


def _size_label(plan: Plan) -> str:
    """The number of parameters in a few characters, of a model with experts as `8x7B`: of these, all but the experts
    and one of them."""
    # other stacks, of projections of streams (Gemma 3n), count as a whole
    numbers = {
        name: stack_and_slice(name)[1] if "_exps." in name and len(spec.shape) > 1 else None
        for name, spec in plan.targets.items()
    }
    experts = 1 + max((number for number in numbers.values() if number is not None), default=-1)
    parameters = sum(math.prod(plan.targets[name].shape) for name, number in numbers.items() if not number)
    scale, unit = next((each for each in _UNITS if parameters > each[0]), _UNITS[-1])
    digits = max(2 - len(str(round(parameters / scale)).lstrip("0")), 0)
    return (f"{experts}x" if experts else "") + f"{parameters / scale:.{digits}f}{unit}"


_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class _Codes:
    """The source's weights that are codes of types that a file can keep, by type: of those with a global scale, the
    weights of which it is known. `encodings` are those of all its codes."""

    by_type: Mapping[GgufType, Sequence[str]]
    encodings: WeightEncodings | None

    @classmethod
    def of(cls, reader: Reader) -> "_Codes":
        packings = packings_of(reader)
        encodings = stored_weight_encodings(reader) if packings else None
        scaled = encodings.scales if encodings else {}
        by_type = {
            type_: [
                name
                for name, packing in packings.items()
                if packing.name == form.name and (name in scaled or not form.format.has_global_scale)
            ]
            for type_, form in KEPT.items()
        }
        return cls(by_type, encodings)

    def kept_in(self, plan: Plan, type_: GgufType) -> GgufPlan:
        """The plan of a file of a type. Raises PrecisionError for one that keeps codes, where there are none."""
        gguf = in_gguf(plan, type_, self.by_type.get(type_, ()))
        if type_ in KEPT and not gguf.kept:
            name = KEPT[type_].name
            if self.by_type[type_]:
                what = f"llama.cpp computes with no {name} codes of a `{plan.model.architecture}` as these are"
                raise PrecisionError(what, do="Choose --scheme bf16, which decodes them.")
            what = f"no weight is {name} codes, of which --scheme {type_} keeps those that there are"
            raise PrecisionError(what, do=_HOW_TO_MAKE[type_])
        return gguf

    def _scaled(self, type_: GgufType) -> WeightEncodings | None:
        """The encodings of kept codes that have a global scale."""
        return self.encodings if type_ in KEPT and KEPT[type_].format.has_global_scale else None

    def global_scales(self, kept: Mapping[str, str], type_: GgufType) -> dict[str, Any]:
        """The tensors of global scales beside kept codes."""
        scaled = self._scaled(type_)
        return dict(scale_tensors(kept, scaled)) if scaled else {}

    def inputs_as_they_are(self, kept: Mapping[str, str], type_: GgufType) -> dict[str, GgufValue]:
        """That llama.cpp is not to make four bits of inputs of a weight, where the source has no scale for them."""
        scaled = self._scaled(type_)
        there = kept.items() if scaled else ()
        names = sorted({stack_and_slice(name)[0] for name, of in there if scaled and scaled.scales[of].input is None})
        if not names:
            return {}
        return {"general.tensor_extra.name": names, "general.tensor_extra.prec_a4": np.zeros(len(names), np.bool_)}

    def notes(self, type_: GgufType, family: GgufFamily, kept: Collection[str]) -> Iterator[str]:
        """Notes on codes of the source that are decoded."""
        for each, names in self.by_type.items():
            decoded = sorted({*names} - {*kept})
            if each == type_ and decoded:
                yield (
                    f"{counted(len(decoded), 'weight')} in {KEPT[each].name} {'is' if len(decoded) == 1 else 'are'} "
                    f"decoded, as llama.cpp computes with none there: {listed(decoded)}."
                )
            elif names and each != type_ and (family.scaled or not KEPT[each].format.has_global_scale):
                yield lower_scheme_note(KEPT[each].name, each)


_FEWER_BITS = ("For fewer bits choose --scheme q4_k_m; llama-quantize makes further types of this file.",)

_HOW_TO_MAKE = {
    "mxfp4": "Choose --scheme bf16; llama-quantize makes codes of its file, for a model with experts MXFP4_MOE.",
    "nvfp4": "`export-inference --target vllm --scheme nvfp4a16` makes such codes; export its result, or choose "
    "--scheme bf16.",
}


def _run(directory: str, names: Sequence[str], options: str) -> str:
    """The command that runs the files of a directory, whose name is written as a shell has it."""
    file, *towers = (f"{directory}/{shlex.quote(name)}" for name in names)
    return f"llama-server -m {file} --mmproj {towers[0]}{options}" if towers else f"llama-cli -m {file}{options}"


def _options(model: ModelShape, family: GgufFamily) -> str:
    """Options with which llama.cpp's programs compute what the file says, but llama.cpp does not read."""
    scaling = model.rope_scaling or {}
    said = {name: usual if scaling.get(name) is None else scaling[name] for name, usual in BETAS.items()}
    if scaling.get("rope_type") != "yarn" or family.reads_betas or said == BETAS:
        return ""
    return "".join(f" --yarn-{name.replace('_', '-')} {value}" for name, value in said.items())


def _config(reader: Reader, model: ModelShape) -> Mapping[str, Any]:
    """config.json with what it says of its text model; one that is made if there is none."""
    if "config.json" not in reader.companions.files:
        return made_config(model, DType.bfloat16.value, reader.companions)
    config = parse_json(reader.companions.files["config.json"], reader.companions.config_path)
    parts = config_parts(config)
    return {key: value for part in reversed(parts) for key, value in part.items()}


def _of_main_type(
    text: Plan, towers: Plan | None, codes: BlocksInRows | None, quantized: bool
) -> tuple[list[str], list[str]]:
    """The tensors that are such codes, or have the type of the text model's largest one, and other matrices, those of
    all layers of a tower as one. Those of a `quantized` file are all that are codes."""
    targets = {**text.targets, **(towers.targets if towers else {})}

    def stored_as(spec: TensorSpec) -> str:
        return spec.stored_dtype if spec.packing is None else "codes" if quantized else spec.packing.name

    stored = {name: stored_as(spec) for name, spec in targets.items()}
    main = codes.name if codes else stored[max(text.targets, key=lambda name: text.targets[name].nbytes)]
    others = [name for name, spec in targets.items() if len(spec.shape) > 1 and stored[name] != main]
    once = dict.fromkeys(re.sub(r"(?<=^v\.blk\.)\d+", "*", name) for name in others)
    return [name for name in stored if stored[name] == main], list(once)


def _towers(
    source: Source, name: str, kind: ValuesType, about: Callable[[Plan], Metadata]
) -> tuple[Mmproj | None, list[str]]:
    """The second file of a wrapper, if there is one, and notes on it, or on why there is none."""
    if (wrapper := source.plan.model.wrapper) is None:
        return None, []
    try:
        mmproj = mmproj_of(source.plan, source.reader, name, kind, about)
    except UnknownArchitecture as error:
        number = counted(len(source.plan.towers.targets), "tensor")
        why = (
            f"The file has the text model of this {wrapper.model_type}. Its towers, {number}, are not in it: llama.cpp "
            f"has those in a second one, which is not written, for {error.what}."
        )
        return None, [why]
    return mmproj, mmproj.notes


def _notes_of_the_model(model: ModelShape, family: GgufFamily, options: str) -> Iterator[str]:
    """What llama.cpp is known to compute otherwise of models that people serve with it all the same."""
    if model.sliding_window and "sliding_window" in family.ignored:
        yield (
            f"llama.cpp has no window of attention for `{model.architecture}`: beyond {model.sliding_window} tokens it "
            "computes otherwise than transformers."
        )
    if (kind := (model.rope_scaling or {}).get("rope_type")) in BEYOND_CONTEXT:
        yield (
            f"llama.cpp scales no rotary embeddings as `{kind}` says: beyond {model.max_position_embeddings} tokens it "
            "computes otherwise than transformers."
        )
    if model.activation == "gelu" and "activation" in family.ignored:
        yield "llama.cpp approximates GELU by tanh, where transformers computes it exactly: logits differ a little."
    epsilon = model.mamba and model.mamba.bcdt_l2_norm_epsilon
    if epsilon and epsilon != model.norm_epsilon:
        yield (
            f"llama.cpp normalises steps, B and C of mixers with the other norms' epsilon, {model.norm_epsilon}, where "
            f"transformers has {epsilon}: logits differ a little."
        )
    if model.mtp_num_layers and family.without_prediction:
        yield (
            f"The file has no layers of multi-token prediction, which are not written of `{model.architecture}`: "
            "logits do not come from them."
        )
    if family.folded:
        yield (
            f"llama.cpp has no multipliers of `{model.architecture}`: weights are multiplied by those of config.json, "
            "and rounded once more. To read the file as the same weights takes --reference, for these."
        )
    if options:
        yield (
            f"llama.cpp reads no betas of YaRN from a file of `{model.architecture}`: it computes as transformers with"
            f"{options}, and without, as in Ollama, with 32 and 1."
        )
    if (model.rope_scaling or {}).get("truncate") is False:
        yield (
            "llama.cpp rounds the bounds between which YaRN blends frequencies, which config.json's `truncate: false` "
            "forbids: it computes a little otherwise than transformers, with every file of this model."
        )
