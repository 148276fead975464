"""GGUF's tensors and Hugging Face's: one table by family, for reading and for writing.

Templates have `{layer}` and `{expert}` for numbers, as the rows of `architectures/` have. The experts of a layer are
one tensor in GGUF, of which `name[{expert}]` is a slice. A layer of multi-token prediction is one more layer in GGUF;
where Hugging Face counts these from 0, the templates have `{mtp}`, and in GGUF `{mtp_layer}`, which counts on from the
decoder's.

Sources: llama.cpp's converter (conversion/*.py, gguf-py/gguf/tensor_mapping.py) of llama-cpp-python 0.3.36.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from precisionctl.checkpoints.gguf.changes import (
    DECAY,
    DELTA_NET,
    GATE_THEN_UP,
    GATE_UP_IN_TURNS,
    KERNEL,
    KEY_PAIRS,
    LATENT_KEYS_VALUES,
    PLUS_ONE,
    QUERY_PAIRS,
    SAME,
    GgufChange,
)


@dataclass(frozen=True)
class GgufRow:
    """A Hugging Face tensor, the tensors that GGUF has for it, and what becomes of its values."""

    hf: str
    gguf: tuple[str, ...]
    change: GgufChange = SAME


@dataclass(frozen=True)
class GgufFamily:
    """The `general.architecture` of a family, and its tensors."""

    architecture: str
    rows: tuple[GgufRow, ...]

    def of_hf(self, name: str, layers: int) -> tuple[GgufRow, tuple[str, ...]] | None:
        """The row of a Hugging Face tensor, and the names of its tensors in GGUF; None if there is none. `layers` is
        the number of the decoder's."""
        key, numbers = _key_and_numbers(name)
        row = next(iter(self._by_key[0].get(key, ())), None)
        if row and "{mtp}" in row.hf:
            numbers = [layers + numbers[0], *numbers[1:]]
        elif row and row.hf.startswith("mtp."):
            numbers = [layers]
        return (row, tuple(_named(template, numbers) for template in row.gguf)) if row else None

    def of_gguf(self, name: str, layers: int) -> tuple[GgufRow, str] | None:
        """The row of a GGUF tensor, or of a slice of one, and the name of its Hugging Face tensor."""
        key, numbers = _key_and_numbers(name)
        predicts = bool(numbers) and numbers[0] >= layers
        rows = self._by_key[1].get(key, ())
        row = next((row for row in rows if row.hf.startswith("mtp.") == predicts), None) or next(iter(rows), None)
        if row and row.hf.startswith("mtp."):
            if not predicts or ("{mtp}" not in row.hf and numbers[0] > layers):
                return None
            numbers = [numbers[0] - layers, *numbers[1:]]
        return (row, _named(row.hf, numbers)) if row else None

    @cached_property
    def _by_key(self) -> tuple[dict[str, list[GgufRow]], dict[str, list[GgufRow]]]:
        """The rows by the keys of their names, in Hugging Face and in GGUF."""
        hf, gguf = dict[str, list[GgufRow]](), dict[str, list[GgufRow]]()
        for row in self.rows:
            hf.setdefault(_PLACEHOLDER.sub("{}", row.hf), []).append(row)
            for name in row.gguf:
                gguf.setdefault(_PLACEHOLDER.sub("{}", name), []).append(row)
        return hf, gguf


_PLACEHOLDER = re.compile(r"\{\w+\}")
_NUMBER = re.compile(r"(?<=[.\[])(?:0|[1-9]\d{0,8})(?=[.\]])")


def _key_and_numbers(name: str) -> tuple[str, list[int]]:
    """A name with `{}` for its numbers, and these, the layer's first."""
    return _NUMBER.sub("{}", name), [int(number) for number in _NUMBER.findall(name)]


def _named(template: str, numbers: Sequence[int]) -> str:
    left = iter(numbers)
    return _PLACEHOLDER.sub(lambda match: str(next(left)), template)


def _in_layers(names: Mapping[str, str], change: GgufChange = SAME, ends: Iterable[str] = ("weight",)) -> list[GgufRow]:
    """A row for each module in a layer and each end of its tensors' names."""
    return [
        GgufRow(f"model.layers.{{layer}}.{hf}.{end}", (f"blk.{{layer}}.{gguf}.{end}",), change)
        for hf, gguf in names.items()
        for end in ends
    ]


def _linears(names: Mapping[str, str], change: GgufChange = SAME) -> list[GgufRow]:
    return _in_layers(names, change, ("weight", "bias"))


def _experts(modules: str, names: Mapping[str, str]) -> list[GgufRow]:
    """A row for each matrix of an expert. `modules` is what its modules' names begin with."""
    return [
        GgufRow(f"model.layers.{{layer}}.{modules}.{{expert}}.{hf}.weight", (_stack(gguf),))
        for hf, gguf in names.items()
    ]


def _stack(name: str, end: str = "weight") -> str:
    return f"blk.{{layer}}.{name}.{end}[{{expert}}]"


def _in_prediction(rows: Iterable[GgufRow]) -> list[GgufRow]:
    """The same rows in layers of multi-token prediction that have numbers and names of their own."""
    return [
        GgufRow(
            row.hf.replace("model.layers.{layer}.", "mtp.layers.{mtp}."),
            tuple(name.replace("{layer}", "{mtp_layer}") for name in row.gguf),
            row.change,
        )
        for row in rows
    ]


def _ends(final_norm: GgufChange = SAME) -> list[GgufRow]:
    """What is not in layers. Without `output` the embedding is the output layer too."""
    return [
        GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
        GgufRow("model.norm.weight", ("output_norm.weight",), final_norm),
        GgufRow("lm_head.weight", ("output.weight",)),
    ]


_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_NORMS_BY_PLACE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
_NORMS_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_FOUR_NORMS = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **_NORMS_BEHIND}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

_QUERY, _KEY = {"self_attn.q_proj": "attn_q"}, {"self_attn.k_proj": "attn_k"}
_VALUE_OUTPUT = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
_ATTENTION = _linears({**_QUERY, **_KEY, **_VALUE_OUTPUT})
_ATTENTION_IN_PAIRS = [*_linears(_QUERY, QUERY_PAIRS), *_linears(_KEY, KEY_PAIRS), *_linears(_VALUE_OUTPUT)]

_GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_MLP = _linears({f"mlp.{hf}": gguf for hf, gguf in _GATED.items()})
_JOINED_MLP = _linears({"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"})
_ROUTER = _in_layers({"mlp.gate": "ffn_gate_inp"})
_EXPERTS = _experts("mlp.experts", {hf: f"{gguf}_exps" for hf, gguf in _GATED.items()})
_SHARED_EXPERT = _in_layers({f"mlp.shared_expert.{hf}": f"{gguf}_shexp" for hf, gguf in _GATED.items()})
_SHARED_EXPERT_GATE = _in_layers({"mlp.shared_expert_gate": "ffn_gate_inp_shexp"})
_SHARED_EXPERTS = _in_layers({f"mlp.shared_experts.{hf}": f"{gguf}_shexp" for hf, gguf in _GATED.items()})
_EXPERT_BIAS = GgufRow("model.layers.{layer}.mlp.gate.e_score_correction_bias", ("blk.{layer}.exp_probs_b.bias",))

_OF_LLAMA = [*_ends(), *_in_layers(_NORMS), *_ATTENTION_IN_PAIRS]
_OF_QWEN = [*_ends(), *_in_layers(_NORMS), *_ATTENTION]
_OF_GEMMA = [*_ends(PLUS_ONE), *_ATTENTION, *_MLP]

_OF_MIXTRAL = [
    *_in_layers({"block_sparse_moe.gate": "ffn_gate_inp"}),
    *_experts("block_sparse_moe.experts", {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}),
]
_OF_GRANITE_MOE = [
    *_in_layers({"block_sparse_moe.router.layer": "ffn_gate_inp"}),
    GgufRow(
        "model.layers.{layer}.block_sparse_moe.input_linear.weight[{expert}]",
        (_stack("ffn_gate_exps"), _stack("ffn_up_exps")),
        GATE_THEN_UP,
    ),
    GgufRow("model.layers.{layer}.block_sparse_moe.output_linear.weight[{expert}]", (_stack("ffn_down_exps"),)),
]
_OF_GPT_OSS = [
    *_ends(),
    *_in_layers(_NORMS_BY_PLACE),
    *_ATTENTION,
    GgufRow("model.layers.{layer}.self_attn.sinks", ("blk.{layer}.attn_sinks.weight",)),
    *_linears({"mlp.router": "ffn_gate_inp"}),
    *(
        row
        for hf, end in {"_blocks": "weight", "_bias": "bias"}.items()
        for row in (
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.gate_up_proj{hf}[{{expert}}]",
                (_stack("ffn_gate_exps", end), _stack("ffn_up_exps", end)),
                GATE_UP_IN_TURNS,
            ),
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.down_proj{hf}[{{expert}}]",
                (_stack("ffn_down_exps", end),),
            ),
        )
    ),
]
"""Its experts are `[out, in]` in GGUF, and so under the names that their codes have."""

_PREDICTION = _in_layers(
    {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
        "embed_tokens": "nextn.embed_tokens",
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
)
_OF_DEEPSEEK = [
    *_ends(),
    *_in_layers(
        {
            **_NORMS,
            "self_attn.q_proj": "attn_q",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.o_proj": "attn_output",
        }
    ),
    GgufRow(
        "model.layers.{layer}.self_attn.kv_b_proj.weight",
        ("blk.{layer}.attn_k_b.weight", "blk.{layer}.attn_v_b.weight"),
        LATENT_KEYS_VALUES,
    ),
    *_MLP,
    *_ROUTER,
    _EXPERT_BIAS,
    *_EXPERTS,
    *_SHARED_EXPERTS,
    *_PREDICTION,
]
_OF_GLM4_MOE = [
    *_ends(),
    *_in_layers({**_NORMS_BY_PLACE, **_QK_NORMS}),
    *_ATTENTION,
    *_MLP,
    *_ROUTER,
    _EXPERT_BIAS,
    *_EXPERTS,
    *_SHARED_EXPERTS,
    *_PREDICTION,
]
_FULL_ATTENTION_OF_QWEN3_NEXT = [
    *_in_layers({**_NORMS_BY_PLACE, **_QK_NORMS}, PLUS_ONE),
    *_ATTENTION,
    *_ROUTER,
    *_EXPERTS,
    *_SHARED_EXPERT,
    *_SHARED_EXPERT_GATE,
]
_OF_QWEN3_NEXT = [
    *_ends(PLUS_ONE),
    *_FULL_ATTENTION_OF_QWEN3_NEXT,
    GgufRow(
        "model.layers.{layer}.linear_attn.in_proj_qkvz.weight",
        ("blk.{layer}.attn_qkv.weight", "blk.{layer}.attn_gate.weight"),
        DELTA_NET,
    ),
    *_in_layers(
        {
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        }
    ),
    *_in_layers({"linear_attn.conv1d": "ssm_conv1d"}, KERNEL),
    GgufRow("model.layers.{layer}.linear_attn.dt_bias", ("blk.{layer}.ssm_dt.bias",)),
    GgufRow("model.layers.{layer}.linear_attn.A_log", ("blk.{layer}.ssm_a",), DECAY),
    *_in_prediction(_FULL_ATTENTION_OF_QWEN3_NEXT),
    GgufRow("mtp.fc.weight", ("blk.{mtp_layer}.nextn.eh_proj.weight",)),
    GgufRow("mtp.pre_fc_norm_embedding.weight", ("blk.{mtp_layer}.nextn.enorm.weight",), PLUS_ONE),
    GgufRow("mtp.pre_fc_norm_hidden.weight", ("blk.{mtp_layer}.nextn.hnorm.weight",), PLUS_ONE),
    GgufRow("mtp.norm.weight", ("blk.{mtp_layer}.nextn.shared_head_norm.weight",), PLUS_ONE),
]


FAMILIES: Mapping[str, GgufFamily] = {
    model_type: GgufFamily(architecture, tuple(rows))
    for model_type, architecture, rows in (
        ("llama", "llama", [*_OF_LLAMA, *_MLP]),
        ("mistral", "llama", [*_OF_LLAMA, *_MLP]),
        ("mixtral", "llama", [*_OF_LLAMA, *_OF_MIXTRAL]),
        ("granite", "granite", [*_OF_LLAMA, *_MLP]),
        ("granitemoe", "granitemoe", [*_OF_LLAMA, *_OF_GRANITE_MOE]),
        ("smollm3", "smollm3", [*_OF_LLAMA, *_MLP]),
        ("qwen2", "qwen2", [*_OF_QWEN, *_MLP]),
        ("qwen2_moe", "qwen2moe", [*_OF_QWEN, *_ROUTER, *_EXPERTS, *_SHARED_EXPERT, *_SHARED_EXPERT_GATE]),
        ("qwen3", "qwen3", [*_OF_QWEN, *_in_layers(_QK_NORMS), *_MLP]),
        ("qwen3_moe", "qwen3moe", [*_OF_QWEN, *_in_layers(_QK_NORMS), *_ROUTER, *_EXPERTS]),
        ("qwen3_next", "qwen3next", _OF_QWEN3_NEXT),
        ("gemma", "gemma", [*_OF_GEMMA, *_in_layers(_NORMS, PLUS_ONE)]),
        ("gemma2", "gemma2", [*_OF_GEMMA, *_in_layers(_FOUR_NORMS, PLUS_ONE)]),
        ("gemma3_text", "gemma3", [*_OF_GEMMA, *_in_layers({**_FOUR_NORMS, **_QK_NORMS}, PLUS_ONE)]),
        (
            "phi3",
            "phi3",
            [
                *_ends(),
                *_in_layers(_NORMS),
                *_linears({"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"}),
                *_JOINED_MLP,
            ],
        ),
        ("olmo2", "olmo2", [*_ends(), *_in_layers({**_NORMS_BEHIND, **_QK_NORMS}), *_ATTENTION, *_MLP]),
        ("olmo3", "olmo2", [*_ends(), *_in_layers({**_NORMS_BEHIND, **_QK_NORMS}), *_ATTENTION, *_MLP]),
        ("gpt_oss", "gpt-oss", _OF_GPT_OSS),
        ("deepseek_v2", "deepseek2", _OF_DEEPSEEK),
        ("deepseek_v3", "deepseek2", _OF_DEEPSEEK),
        ("glm4_moe", "glm4moe", _OF_GLM4_MOE),
    )
}
"""By the `model_type` of a config.json. Several may have one `general.architecture`."""
