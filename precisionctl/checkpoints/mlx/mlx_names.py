"""Directories that mlx-lm saved: their tensors under the names and in the shapes that published files have.

mlx-lm's `sanitize` stacks the experts of a layer, `mlp.switch_mlp.up_proj.weight` `[experts, out, in]`, and has the
channels of convolutions last. These bytes are only named otherwise here. Where it has cut a weight, turned it or added
one to it, the parts are named `WEIGHT/PLACE-HOW.weight`, and `decoded/mlx_codes.py` puts them together. Where it does
anything else (weights times multipliers, for instance), or where that was not looked at, they are refused by the
`model_type`. Source: mlx-lm 0.32 (models/*.py, sanitize), run on a small model of each of `RENAMED`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.architectures.wrappers import is_wrapper
from precisionctl.checkpoints.decoded.metal_codes import METHOD as OF_TRANSFORMERS
from precisionctl.checkpoints.decoded.mlx_codes import METHOD
from precisionctl.checkpoints.decoded.mlx_parts import PART
from precisionctl.checkpoints.hf_directory.safetensors_file import Places, StoredTensor, header_has, read_described
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.coded_weights import MLX_KEY, quant_method_of


@dataclass(frozen=True)
class _Renaming:
    """What a tensor is called by mlx-lm, and in published files: names with the same `fields`, each of which has a
    pattern, and with `{n}` for the place in a stack. Behind a slash is how mlx-lm has a part of the weight."""

    mlx: str
    published: str
    fields: tuple[str, ...]

    @cached_property
    def of_mlx(self) -> re.Pattern[str]:
        return self._pattern(self.mlx)

    @cached_property
    def of_published(self) -> re.Pattern[str]:
        return self._pattern(self.published.partition("/")[0])

    def _pattern(self, name: str) -> re.Pattern[str]:
        pattern = re.escape(name).replace(r"\{n\}", r"(?P<n>\d{1,9})")
        for number, field in enumerate(self.fields):
            pattern = pattern.replace(rf"\{{{number}\}}", f"(?P<field{number}>{field})")
        return re.compile(pattern)


def _renamings(*of: tuple[str, ...]) -> tuple[_Renaming, ...]:
    return tuple(_Renaming(mlx, published, tuple(fields)) for mlx, published, *fields in of)


_LAYER, _MLP, _ATTENTION = r".+\.layers\.\d+", r".+\.mlp", r".+\.self_attn"
_EXPERTS = r".+\.(?:mlp|feed_forward)\.experts"
_BLOCK, _FEED_FORWARD, _ANY = r".+\.block_sparse_moe", r".+\.feed_forward", r".+"

_STACKS = _renamings(
    ("{0}.switch_mlp.{1}", "{0}.experts.{n}.{1}", r".+\.(?:mlp|feed_forward)", r"(?:gate|up|down)_proj\..+"),
    ("{0}.switch_mlp.gate_proj.{1}", "{0}.experts.{n}.w1.{1}", _BLOCK, _ANY),
    ("{0}.switch_mlp.up_proj.{1}", "{0}.experts.{n}.w3.{1}", _BLOCK, _ANY),
    ("{0}.switch_mlp.down_proj.{1}", "{0}.experts.{n}.w2.{1}", _BLOCK, _ANY),
    ("{0}.switch_mlp.fc1.{1}", "{0}.experts.{n}.up_proj.{1}", r".+\.mixer", _ANY),
    ("{0}.switch_mlp.fc2.{1}", "{0}.experts.{n}.down_proj.{1}", r".+\.mixer", _ANY),
)
_EXPERTS_THEMSELVES = _renamings(("{0}.{1}", "{0}.{n}.{1}", _EXPERTS, r"(?:gate|up|down)_proj\..+"))
_OF_GEMMA4 = _renamings(("{0}.switch_glu.{1}", "{0}.{n}.{1}", r".+\.experts", r"(?:gate|up|down)_proj\..+"))
_LATENT_PARTS = (
    ("{0}.embed_q.{1}", "{0}.kv_b_proj.weight/{n}a-turned.{1}", _ATTENTION, _ANY),
    ("{0}.unembed_out.{1}", "{0}.kv_b_proj.weight/{n}b-joined.{1}", _ATTENTION, _ANY),
)
_LATENT = _renamings(*_LATENT_PARTS)
_OF_GPT_OSS = _renamings(
    ("{0}.gate_proj.bias", "{0}.gate_up_proj_bias[{n}]/0-alternating.weight", _EXPERTS),
    ("{0}.up_proj.bias", "{0}.gate_up_proj_bias[{n}]/1-alternating.weight", _EXPERTS),
    ("{0}.down_proj.bias", "{0}.down_proj_bias[{n}]", _EXPERTS),
    ("{0}.gate_proj.{1}", "{0}.gate_up_proj_blocks[{n}]/0-alternating.{1}", _EXPERTS, _ANY),
    ("{0}.up_proj.{1}", "{0}.gate_up_proj_blocks[{n}]/1-alternating.{1}", _EXPERTS, _ANY),
    ("{0}.down_proj.{1}", "{0}.down_proj_blocks[{n}]/0-joined.{1}", _EXPERTS, _ANY),
)
_OF_GRANITE = _renamings(
    ("{0}.switch_mlp.gate_proj.{1}", "{0}.input_linear.weight[{n}]/0-joined.{1}", _BLOCK, _ANY),
    ("{0}.switch_mlp.up_proj.{1}", "{0}.input_linear.weight[{n}]/1-joined.{1}", _BLOCK, _ANY),
    ("{0}.switch_mlp.down_proj.{1}", "{0}.output_linear.weight[{n}]/0-joined.{1}", _BLOCK, _ANY),
)
_OF_DENSE_GRANITE = _renamings(
    ("{0}.mlp.gate_proj.{1}", "{0}.shared_mlp.input_linear.weight/0-joined.{1}", _LAYER, _ANY),
    ("{0}.mlp.up_proj.{1}", "{0}.shared_mlp.input_linear.weight/1-joined.{1}", _LAYER, _ANY),
    ("{0}.mlp.down_proj.{1}", "{0}.shared_mlp.output_linear.{1}", _LAYER, _ANY),
)
_OF_EXAONE_MOE = _renamings(("{0}.gate.e_score_correction_bias", "{0}.e_score_correction_bias", _MLP))
_OF_LAGUNA = _renamings(
    ("{0}.gate.e_score_correction_bias", "{0}.experts.e_score_correction_bias", _MLP),
    ("{0}.proj.{1}", "{0}.{1}", r".+\.mlp\.gate", _ANY),
)
_OF_LFM2_MOE = _renamings(
    ("{0}.switch_mlp.gate_proj.{1}", "{0}.experts.{n}.w1.{1}", _FEED_FORWARD, _ANY),
    ("{0}.switch_mlp.up_proj.{1}", "{0}.experts.{n}.w3.{1}", _FEED_FORWARD, _ANY),
    ("{0}.switch_mlp.down_proj.{1}", "{0}.experts.{n}.w2.{1}", _FEED_FORWARD, _ANY),
    ("{0}.gate_proj.{1}", "{0}.w1.{1}", _FEED_FORWARD, _ANY),
    ("{0}.up_proj.{1}", "{0}.w3.{1}", _FEED_FORWARD, _ANY),
    ("{0}.down_proj.{1}", "{0}.w2.{1}", _FEED_FORWARD, _ANY),
)
_NORMS_PLUS_ONE = _renamings(
    (
        *("{0}.weight", "{0}.weight/0-plus_one.weight"),
        r".+\.(?:input|post_attention)_layernorm|.+\.[qk]_norm|model\.norm",
    ),
)

_OF_STEP = _renamings(
    ("{0}.mlp.switch_mlp.{1}", "{0}.moe.experts.{n}.{1}", _LAYER, _ANY),
    ("{0}.mlp.gate.router_bias", "{0}.moe.router_bias", _LAYER),
    ("{0}.mlp.gate.gate.{1}", "{0}.moe.gate.{1}", _LAYER, _ANY),
    ("{0}.mlp.share_expert.{1}", "{0}.share_expert.{1}", _LAYER, _ANY),
)
_OF_GPT_NEOX = _renamings(
    ("model.h.{0}", "gpt_neox.layers.{0}", _ANY),
    ("model.embed_out.{0}", "embed_out.{0}", _ANY),
    ("model.{0}", "gpt_neox.{0}", _ANY),
)
_OF_GPT_J = _renamings(("model.{0}", "transformer.{0}", _ANY))
_OF_GEMMA3N = _renamings(("model.language_model.{0}", "model.{0}", _ANY))
_OF_BAILING_MOE = _renamings(("{0}.gate_proj.{1}", "{0}.{1}", r".+\.mlp\.gate", "weight|scales|biases"))
_OF_KIMI_LINEAR = _renamings(
    ("{0}.mlp.switch_mlp.gate_proj.{1}", "{0}.block_sparse_moe.experts.{n}.w1.{1}", _LAYER, _ANY),
    ("{0}.mlp.switch_mlp.up_proj.{1}", "{0}.block_sparse_moe.experts.{n}.w3.{1}", _LAYER, _ANY),
    ("{0}.mlp.switch_mlp.down_proj.{1}", "{0}.block_sparse_moe.experts.{n}.w2.{1}", _LAYER, _ANY),
    ("{0}.mlp.shared_experts.{1}", "{0}.block_sparse_moe.shared_experts.{1}", _LAYER, _ANY),
    ("{0}.mlp.e_score_correction_bias", "{0}.block_sparse_moe.gate.e_score_correction_bias", _LAYER),
    ("{0}.mlp.gate.{1}", "{0}.block_sparse_moe.gate.{1}", _LAYER, _ANY),
    ("{0}_conv.conv.{1}", "{0}_conv1d.{1}", r".+\.self_attn\.[qkv]", _ANY),
    *_LATENT_PARTS,
)

RENAMED: Mapping[str, tuple[_Renaming, ...]] = {
    **dict.fromkeys(
        "apertus cohere cohere2 deepseek deepseek_v2 ernie4_5 exaone exaone4 falcon_mamba gemma gemma2 gemma3_text "
        "glm glm4 glm4_moe gpt_bigcode granite helium hunyuan_v1_dense internlm3 iquestcoder jamba lfm2 llama mamba "
        "mamba2 mellum mimo minicpm3 minimax_m2 ministral3 mistral mixtral muse_glimmer_text nemotron nemotron-nas "
        "nemotron_h olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 "
        "solar_open stablelm starcoder2".split(),
        (),
    ),
    **dict.fromkeys("afmoe dots1 llama4_text".split(), _EXPERTS_THEMSELVES),
    **dict.fromkeys("deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 mistral4".split(), _LATENT),
    "bailing_moe": _OF_BAILING_MOE,
    "gemma3n_text": _OF_GEMMA3N,
    "gemma4_text": _OF_GEMMA4,
    "gpt_neox": _OF_GPT_NEOX,
    "gptj": _OF_GPT_J,
    "kimi_linear": _OF_KIMI_LINEAR,
    "minimax_m3_vl_text": (),
    "exaone_moe": _OF_EXAONE_MOE,
    "gpt_oss": _OF_GPT_OSS,
    "granitemoe": _OF_GRANITE,
    "granitemoehybrid": (*_OF_GRANITE, *_OF_DENSE_GRANITE),
    "laguna": _OF_LAGUNA,
    "lfm2_moe": _OF_LFM2_MOE,
    "step3p5": (*_OF_STEP, *_NORMS_PLUS_ONE),
    **dict.fromkeys("qwen3_5_moe_text qwen3_5_text qwen3_next".split(), _NORMS_PLUS_ONE),
}
"""The families of which it is known what mlx-lm changes, and what that is beside `_STACKS` and shapes."""

WRAPPED: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma3n": ("gemma3n_text",),
    **dict.fromkeys(("gemma4", "gemma4_unified"), ("gemma4_text",)),
    "kimi_k25": ("deepseek_v3", "kimi_k2"),
    "llama4": ("llama4_text",),
    "llava": ("llama", "mistral"),
    "minimax_m3_vl": ("minimax_m3_vl_text",),
    "mistral3": ("ministral3", "mistral", "mistral4"),
    "muse_glimmer": ("muse_glimmer_text",),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2",)),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
}
"""The wrappers whose text models mlx-lm computes, without towers, and the families of these that its class has."""

ALONE_IN_WRAPPER = {
    "gemma3n_text": "gemma3n",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "muse_glimmer_text": "muse_glimmer",
    "llama4_text": "llama4",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
}
"""The text models that mlx-lm has as a wrapper's alone, and which one's: also without towers, they are such to it."""

_WITHIN = "language_model."
"""What stands before the names of most text models that are a wrapper's."""


def within(model: ModelShape) -> str:
    """What mlx-lm has before the names of the model, if it is the text model of a wrapper there."""
    wrapper = model.wrapper.model_type if model.wrapper else ALONE_IN_WRAPPER.get(model.architecture)
    return "" if wrapper in (None, "gemma3n", "muse_glimmer") else _WITHIN


def is_known(model: ModelShape) -> bool:
    """Whether it is known what mlx-lm stores of a model."""
    families = WRAPPED.get(model.model_type, ()) if model.wrapper else RENAMED
    return model.architecture in families


@dataclass(frozen=True)
class MlxTensor:
    """What mlx-lm has of a published tensor: a tensor's name, how it is a part (`mlx_parts.PART`; empty where it is the
    whole), and its place in a stack of experts; None where it is in none."""

    name: str
    how: str
    place: int | None


def in_mlx_names(published: str, model_type: str, *, dense: bool) -> list[MlxTensor]:
    """The tensors of mlx-lm that a published one becomes, of a model of a `model_type` in RENAMED: in the order of the
    rows that they are of. Of a latent's keys and values each is that of all heads. `dense`: it has no experts."""
    family = RENAMED[model_type]
    if model_type == "granitemoehybrid":
        family = _OF_DENSE_GRANITE if dense else _OF_GRANITE
    found = list[MlxTensor]()
    for renaming in (*family, *_STACKS):
        if match := renaming.of_published.fullmatch(published):
            values = match.groupdict()
            fields = [values.get(f"field{number}", "weight") for number in range(len(renaming.fields))]
            how, place = renaming.published.partition("/")[2], values.get("n")
            name = renaming.mlx.format(*fields)
            made = MlxTensor(name, how.partition("-")[2].partition(".")[0], None if place is None else int(place))
            if not how:
                return [made]
            found.append(made)
    return found or [MlxTensor(published, "", None)]


def mlx_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that mlx-lm has a tensor of a published shape in: the channels of convolutions are last."""
    if _CONVOLUTION.fullmatch(name) and len(shape) == 3:
        return (shape[0], shape[2], shape[1])
    return () if _NUMBER.fullmatch(name) else shape


_MOST_TENSORS = 1 << 19
"""Most tensors of a directory with stacks taken apart: of Kimi K2, in codes, it is 240,000, but a header of a few bytes
can claim any number."""

_CONVOLUTION = re.compile(r".+\.(?:[qkv]_conv1d|conv1d|conv)\.weight")
_NUMBER = re.compile(r".+\.act_fn\.alpha_[pn]")


def in_published_names(places: Places, config: dict[str, Any], where: Path) -> tuple[Places, dict[str, Any]]:
    """The tensors of a directory by their published names, and its config.json, with a `quantization_config` that says
    what `quantization` does of those that are codes. Of a wrapper they are those of its text model alone. Both are as
    they were where MLX did not make it.

    Raises PrecisionError for a family whose tensors mlx-lm changes in other ways, or whose were not looked at: it adds
    one to norms of some; and for towers. DamagedCheckpoint for codes without `quantization`.
    """
    if quant_method_of(config) == OF_TRANSFORMERS:
        return places, config
    coded = next((name for name, (_, tensor) in places.items() if _is_coded(name, tensor, places)), None)
    if not (coded or saved_by_mlx(file for file, _ in places.values())):
        return places, config
    said = config.get(MLX_KEY)
    settings = said if isinstance(said, dict) else None
    if coded and settings is None:
        what = f"`{coded}` is codes of MLX, and `{MLX_KEY}` does not say which: {shown(said)}"
        raise DamagedCheckpoint(what, where=where, do="Copy config.json again.")

    places, settings, config = _of_text_model(places, settings, config, where)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in RENAMED:
        raise PrecisionError(
            f"{'codes' if coded else 'values'} of MLX of a {shown(family)}, of which mlx-lm stores other tensors than "
            "published files have, or was not seen to store the same",
            where=where,
            do="Start from the release in BF16. docs/mlx.md names the families that are read.",
        )

    renamings = (*RENAMED[family], *_STACKS)
    if RENAMED[family] is _NORMS_PLUS_ONE and not any(_is_moved(name, tensor) for name, (_, tensor) in places.items()):
        renamings = _STACKS  # mlx-lm adds one where it moves the channels of convolutions, too

    found: Places = {}
    names = dict[str, list[str]]()
    for name, (file, tensor) in places.items():
        published = _published(name, tensor, renamings, _MOST_TENSORS - len(found), file)
        names[name] = list(published)
        for each, placed in published.items():
            if each in found:
                raise DamagedCheckpoint(f"`{each}` is there, and is a part of a stack of experts too", where=file)
            found[each] = file, placed

    if not coded and not any(map(PART.fullmatch, found)):
        return found, config
    by_module = dict[str, Any]()  # as published tensors name it; other settings stay what they are
    for key, value in (settings or {}).items():
        for name in names.get(f"{key}.weight") or [f"{key}.weight"]:
            by_module[name.removesuffix(".weight")] = value
    return found, config | {"quantization_config": by_module | {"quant_method": METHOD}}


def _of_text_model(
    places: Places, settings: dict[str, Any] | None, config: dict[str, Any], where: Path
) -> tuple[Places, dict[str, Any] | None, dict[str, Any]]:
    """Tensors, `quantization` and config.json of the text model that mlx-lm has of a wrapper, as it would be alone; of
    anything else as they are."""
    if not is_wrapper(config) or config["model_type"] not in WRAPPED:
        return places, settings, config
    model = from_hf_config(config, where)
    before = within(model)
    if other := next((name for name in places if not name.startswith((f"{before}model.", f"{before}lm_head."))), None):
        raise PrecisionError(
            f"`{shown(other)}` is no tensor of the text model: mlx-vlm changes towers, in ways that are not known here",
            where=where,
            do="Start from the release in BF16.",
        )
    alone = {name.removeprefix(before): place for name, place in places.items()}
    said = settings and {name.removeprefix(before): its for name, its in settings.items()}
    tied = model.tied_embeddings and "lm_head.weight" not in alone
    return alone, said, to_hf_config(replace(model, wrapper=None, tied_embeddings=tied), DType.bfloat16.value)


def _is_coded(name: str, tensor: StoredTensor, places: Places) -> bool:
    coded = name.endswith(".weight") and tensor.spec.dtype == DType.uint32
    return coded and f"{name.removesuffix('weight')}scales" in places


def saved_by_mlx(files: Iterable[Path]) -> bool:
    """Whether the metadata of these files of weights say so. All of a directory's do."""
    file = next(iter(files), None)
    if file is None or file.suffix != ".safetensors" or not header_has(file, b'"mlx"'):
        return False
    return read_described(file)[1].get("format") == "mlx"


def _is_moved(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a convolution's weight with its channels last, `[channels, width, 1]`."""
    shape = tensor.spec.shape
    return _CONVOLUTION.fullmatch(name) is not None and len(shape) == 3 and shape[2] == 1


def _published(
    name: str, tensor: StoredTensor, renamings: Iterable[_Renaming], most: int, where: Path
) -> dict[str, StoredTensor]:
    """What published files have in the place of a tensor: of a stack, at `most` so many."""
    shape = tensor.spec.shape
    if _is_moved(name, tensor):
        shape = (shape[0], 1, shape[1])
    elif _NUMBER.fullmatch(name) and not shape:
        shape = (1,)
    found = ((match, renaming.published) for renaming in renamings if (match := renaming.of_mlx.fullmatch(name)))
    match, published = next(found, (None, ""))
    if match is None or ("{n}" in published and not shape):
        return {name: replace(tensor, spec=TensorSpec(shape, tensor.spec.dtype))}
    if "{n}" not in published:
        return {published.format(*match.groups()): replace(tensor, spec=TensorSpec(shape, tensor.spec.dtype))}
    if not 0 < shape[0] <= most:
        raise DamagedCheckpoint(f"`{name}` is a stack of {shape[0]} matrices", where=where)
    spec = TensorSpec(shape[1:], tensor.spec.dtype)
    return {
        published.format(*match.groups(), n=place): StoredTensor(spec, tensor.offset + place * spec.nbytes)
        for place in range(shape[0])
    }
