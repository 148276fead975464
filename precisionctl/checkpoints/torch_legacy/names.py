"""Names in the state dict of one rank -> logical names, and how tensor parallelism cuts each parameter.

A rank numbers its layers from 0 in each pipeline stage, and its experts from 0. Three spellings are read: those of
Transformer Engine's layer specs, of Megatron's local specs, and of models before Megatron-Core
(`language_model.encoder. ...`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from precisionctl.checkpoints.megatron.keys import as_in_torch_dist, without_expert
from precisionctl.checkpoints.megatron.norm_names import te_names
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import COLUMNS, GATED_ROWS, REPLICATED, ROWS, Parallel

_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
_SEQUENTIAL = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d{1,9})\.(linear_fc[12]\.(?:weight|bias|_extra_state))")
_GROUPED = (".mlp.experts.weight1", ".mlp.experts.weight2")


def flattened(state: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The entries of nested dicts (down to 8 levels), under names joined by dots: models before Megatron-Core saved
    nested ones."""
    for key, value in state.items():
        if isinstance(value, dict) and depth < 8 and not str(key).endswith("_extra_state"):
            yield from flattened(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def local_names(state: Mapping[str, Any], where: object, indexed: bool) -> dict[str, Any]:
    """The entries of a stage's state dict under Megatron-Core's names, with the rank's own layer and expert numbers.
    `indexed` says whether norms of latents are no part of linears, as beside indexers, which need not be in this stage.

    Raises DamagedCheckpoint for experts in the form of legacy GroupedMLP, and for an entry that is there under two
    names. `where` names the file in errors.
    """
    found: dict[str, Any] = {}
    for name, value in flattened(state):
        renamed = name
        if name.startswith(("language_model.", "word_embeddings_for_head.")):
            for pattern, new in _BEFORE_CORE:
                renamed = pattern.sub(new, renamed, count=1) if pattern.match(renamed) else renamed
        if "local_experts" in renamed and (match := _SEQUENTIAL.fullmatch(renamed)):
            renamed = f"{match[1]}{match[3]}{match[2]}"
        if renamed.endswith(_GROUPED):
            what = f"`{name}` holds all experts in one transposed matrix (legacy GroupedMLP)"
            raise DamagedCheckpoint(what, where=where, do="Save it with --moe-use-legacy-grouped-gemm switched off.")
        if renamed in found:
            raise DamagedCheckpoint(f"`{name}` is there twice, under two names", where=where)
        found[renamed] = value
    te = te_names(found, indexed)
    return {as_in_torch_dist(te.get(name, name)): found[name] for name in found}


_BEFORE_CORE = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"language_model\.embedding\.(word|position)_embeddings\.", r"embedding.\1_embeddings."),
        (r"language_model\.(?:encoder|transformer)\.", r"decoder."),
        (r"language_model\.output_layer\.", r"output_layer."),
        (r"word_embeddings_for_head\.", r"output_layer."),
        (r"(decoder\.)final_norm\.", r"\1final_layernorm."),
        (r"(decoder\.layers\.\d+\.)input_norm\.", r"\1input_layernorm."),
        (r"(decoder\.layers\.\d+\.)post_attention_(?:layer)?norm\.", r"\1pre_mlp_layernorm."),
        (r"(decoder\.layers\.\d+\.)(?:self_)?attention\.query_key_value\.", r"\1self_attention.linear_qkv."),
        (r"(decoder\.layers\.\d+\.)(?:self_)?attention\.dense\.", r"\1self_attention.linear_proj."),
        (r"(decoder\.layers\.\d+\.mlp\.)dense_h_to_4h\.", r"\1linear_fc1."),
        (r"(decoder\.layers\.\d+\.mlp\.)dense_4h_to_h\.", r"\1linear_fc2."),
    )
)
"""Names before Megatron-Core (megatron/legacy/model/: language_model.py and transformer.py) -> today's."""


def count_layers(names: Iterable[str]) -> int:
    """The number of decoder layers of a stage."""
    return len({match[1] for name in names if (match := _LAYER.fullmatch(name))})


def renumbered(name: str, first_layer: int, first_expert: int) -> str:
    """A rank's name with these offsets added to the numbers of its layer and expert; negative offsets are the way
    back."""
    if match := _LAYER.fullmatch(name):
        name = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}"
    grouped, expert = without_expert(name)
    return name if expert is None else f"{grouped}{expert + first_expert}"


_ROWS = (
    *("word_embeddings.weight", "per_layer_embedding.weight"),
    *("output_layer.weight", "output_layer.bias", "softmax_offset", "attn_sink"),
    *("eh_proj.weight", ".e_proj.weight", ".h_proj.weight"),
    *("self_attention.dt_bias", "self_attention.A_log"),
    *("self_attention.softmax_scaling.scale", "self_attention.softmax_scaling.bias"),
    *("mixer.dt_bias", "mixer.A_log", "mixer.D", "mixer.norm.weight", "mixer.dt_proj.weight", "mixer.dt_proj.bias"),
)
_ROWS_OF = re.compile(
    r".+\.(?:linear_qkv|linear_gate|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|f_b_proj|g_b_proj"
    r"|self_attention\.(?:[bgkqv]_proj|q_b_proj|kv_b_proj|[kqv]_conv1d))\.(?:weight|bias)"
)
_FC1 = re.compile(r"(.+\.)linear_fc1\.(?:weight|bias)(\d*)")
_COLUMNS = re.compile(
    r".+\.(?:linear_proj|linear_fc2|(?:self_attention|(?:mamba_)?mixer)\.out_proj|self_attention\.o_proj|mixer\.x_proj"
    r"|ngram_embedding)\.weight\d*"
)


def parallel_of(name: str, gated: bool) -> Parallel:
    """How tensor parallelism cuts a parameter, by the kind of Megatron's module. With `gated`, linear_fc1 holds gate
    and up, which are cut separately."""
    if _FC1.fullmatch(name):
        return GATED_ROWS if gated else ROWS
    if name.endswith(_ROWS) or _ROWS_OF.fullmatch(name):
        return ROWS
    return COLUMNS if _COLUMNS.fullmatch(name) else REPLICATED


def fc_weights(name: str) -> tuple[str, ...]:
    """For a parameter of an MLP's linear_fc1, the names of the weights of linear_fc1 and linear_fc2; else nothing."""
    match = _FC1.fullmatch(name)
    return (f"{match[1]}linear_fc1.weight{match[2]}", f"{match[1]}linear_fc2.weight{match[2]}") if match else ()
