"""GPT-2 and those whose graph is like its: StarCoder, GPT-NeoX, Falcon, BLOOM and MPT. Layer norms, queries, keys and
values in one tensor, and an MLP without a gate.

Sources: llama.cpp's src/models/gpt2.cpp, starcoder.cpp, gptneox.cpp, falcon.cpp, bloom.cpp and mpt.cpp, and
conversion/gpt2.py, starcoder.py, gptneox.py, falcon.py, bloom.py and mpt.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.tables import falcon, gpt2, gpt_neox, mpt
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.tensor_changes import QKV_OF_GROUPS, SAME, TRANSPOSED, TensorChange

_QKV = "self_attn.query_key_value"
_LINEARS_OF_GPT_2 = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
_POSITIONS = rows.GgufRow("transformer.wpe.weight", ("position_embd.weight",))
_EMBEDDING_NORM = [
    rows.GgufRow(f"transformer.word_embeddings_layernorm.{end}", (f"token_embd_norm.{end}",))
    for end in ("weight", "bias")
]


def _rows(names: Mapping[str, str], qkv: TensorChange = SAME) -> list[rows.GgufRow]:
    """The rows that all have, under the names of a family."""
    in_llama_cpp = [
        *rows.outside_layers(),
        rows.FINAL_NORM_BIAS,
        *rows.linears({**rows.NORMS, "self_attn.o_proj": "attn_output"}),
        *rows.linears({_QKV: "attn_qkv"}, qkv),
        *rows.UNGATED_MLP,
    ]
    return rows.renamed(in_llama_cpp, names)


_COMPUTED: Mapping[str, Any] = {
    "kv_channels": keys.hidden_by_heads,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "mlp_bias": True,
}
_BIASES: Mapping[str, Any] = dict.fromkeys(("qkv_bias", "proj_bias"), True)
_AS_MANY_KEYS: Mapping[str, Any] = {"num_query_groups": keys.SameAs("num_attention_heads")}
_LEARNED: Mapping[str, Any] = {"position_embedding": "learned_absolute"}
_GELU: Mapping[str, Any] = {"activation": "gelu_tanh"}
"""llama.cpp approximates GELU, also where it is exact."""

_ONE_NORM = keys.GgufEntry(
    ("shared_layernorm",), (), lambda file: {"shared_layernorm": not file.has("blk.0.attn_norm_2.weight")}
)
_PARALLEL = keys.GgufEntry(
    ("parallel_residual",),
    ("use_parallel_residual",),
    lambda file: {"parallel_residual": file.said("use_parallel_residual") is not False},
    lambda model: {"use_parallel_residual": model.parallel_residual},
)

FAMILIES = {
    "gpt2": GgufFamily(
        "gpt2",
        rows=[
            # linears in layers are `[in, out]`
            *(
                replace(row, change=TRANSPOSED) if row.hf.endswith(_LINEARS_OF_GPT_2) else row
                for row in _rows(gpt2.NAMES)
            ),
            _POSITIONS,
        ],
        keys=(keys.LAYERS, keys.CONTEXT, keys.WIDTH, keys.MLP_SIZE, keys.EQUAL_HEADS, keys.LAYER_NORM_EPSILON),
        turned=None,
        computed={**_COMPUTED, **_BIASES, **_AS_MANY_KEYS, **_LEARNED},
        ignored=_GELU,
    ),
    "gpt_bigcode": GgufFamily(
        "starcoder",
        rows=[*_rows(gpt2.NAMES, QKV_OF_GROUPS), _POSITIONS],
        keys=(keys.CONTEXT, keys.WIDTH, keys.MLP_SIZE, keys.LAYERS, keys.HEADS, keys.LAYER_NORM_EPSILON),
        turned=None,
        computed={**_COMPUTED, **_BIASES, **_LEARNED},
        ignored=_GELU,
    ),
    "gpt_neox": GgufFamily(
        "gptneox",
        rows=_rows(gpt_neox.NAMES, QKV_OF_GROUPS),
        keys=(
            *(keys.CONTEXT, keys.WIDTH, keys.LAYERS, keys.MLP_SIZE, rope_keys.TURNED, keys.EQUAL_HEADS),
            *(_PARALLEL, keys.LAYER_NORM_EPSILON, rope_keys.UNUSUAL_BASE),
        ),
        computed={**_COMPUTED, **_BIASES, **_AS_MANY_KEYS, "tied_embeddings": False},
        ignored=_GELU,
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "falcon": GgufFamily(
        "falcon",
        rows=[
            # models with two norms (40B) have another name for that of the MLP
            *(
                replace(row, only=lambda model, layer: model.shared_layernorm) if ".input_layernorm." in row.hf else row
                for row in _rows(falcon.NAMES, QKV_OF_GROUPS)
            ),
            *rows.renamed(rows.linears({"ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"}), falcon.NAMES),
        ],
        keys=(
            keys.CONTEXT,
            keys.write_only(lambda model: {"tensor_data_layout": "jploski"}),
            keys.WIDTH,
            keys.MLP_SIZE,
            keys.LAYERS,
            keys.HEADS,
            keys.LAYER_NORM_EPSILON,
            rope_keys.UNUSUAL_BASE,
            _ONE_NORM,
        ),
        computed={**_COMPUTED, "mlp_bias": False, "parallel_residual": True},
        ignored=_GELU,
        scalings=rope_keys.UNSCALED_ALONE,
    ),
    "bloom": GgufFamily(
        "bloom",
        rows=[*_rows(falcon.NAMES, QKV_OF_GROUPS), *_EMBEDDING_NORM],
        keys=(keys.CONTEXT, keys.WIDTH, keys.MLP_SIZE, keys.LAYERS, keys.HEADS, keys.LAYER_NORM_EPSILON),
        turned=None,
        computed={
            **_COMPUTED,
            **_BIASES,
            **_AS_MANY_KEYS,
            "activation": "gelu_tanh",
            "position_embedding": "alibi",
            "embedding_layernorm": True,
        },
    ),
    "mpt": GgufFamily(
        "mpt",
        rows=_rows(mpt.NAMES),
        keys=(
            keys.CONTEXT,
            keys.WIDTH,
            keys.LAYERS,
            keys.MLP_SIZE,
            keys.EQUAL_HEADS,
            keys.LAYER_NORM_EPSILON,
            keys.QKV_CLAMP,
            keys.always("attention.max_alibi_bias", 8.0),
        ),
        turned=None,
        computed={**_COMPUTED, **_AS_MANY_KEYS, "mlp_bias": False, "norm_bias": False, "position_embedding": "alibi"},
        ignored={"activation": "gelu"},
    ),
}
