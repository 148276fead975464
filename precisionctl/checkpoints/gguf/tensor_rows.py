"""What tables of GGUF's tensors are made of: a row is a Hugging Face tensor and those that GGUF has for it.

Templates have `{layer}` and `{expert}` for numbers, as the rows of `architectures/` have. The experts of a layer are
one tensor in GGUF, of which `name[{expert}]` is a slice; so are projections of residual streams (`{stream}`). A layer
of multi-token prediction is one more layer in GGUF; where Hugging Face counts these from 0, the templates have `{mtp}`,
and in GGUF `{mtp_layer}`, which counts on from the decoder's.

Sources: llama.cpp's converter (conversion/*.py, gguf-py/gguf/tensor_mapping.py) of llama-cpp-python 0.3.36.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from precisionctl.checkpoints.tensor_changes import ROTARY_NEIGHBOURS, SAME, TensorChange
from precisionctl.model.model_shape import ModelShape


@dataclass(frozen=True)
class GgufRow:
    """A Hugging Face tensor, the tensors that GGUF has for it, and what becomes of its values. `only`: in which models,
    and in which of their layers, where another row has one of the names in others."""

    hf: str
    gguf: tuple[str, ...]
    change: TensorChange = SAME
    only: Callable[[ModelShape, int], bool] | None = None

    def is_in(self, model: ModelShape, numbers: Sequence[int]) -> bool:
        """Whether the layer that the first of these numbers names has the row."""
        return self.only is None or self.only(model, numbers[0])


@dataclass(frozen=True)
class TensorTable:
    """The rows of a family, by names of either side."""

    rows: Sequence[GgufRow]

    def of_hf(self, name: str, model: ModelShape) -> tuple[GgufRow, tuple[str, ...]] | None:
        """The row of a model's Hugging Face tensor, and the names of its tensors in GGUF; None if there is none."""
        key, numbers = _key_and_numbers(name)
        layers = model.num_layers
        row = next((row for row in self._by_key[0].get(key, ()) if row.is_in(model, numbers)), None)
        if row and "{mtp}" in row.hf:
            numbers = [layers + numbers[0], *numbers[1:]]
        elif row and row.hf.startswith("mtp."):
            numbers = [layers]
        return (row, tuple(_named(template, numbers) for template in row.gguf)) if row else None

    def of_gguf(self, name: str, model: ModelShape) -> tuple[GgufRow, str] | None:
        """The row of a GGUF tensor, or of a slice of one, and the name of its Hugging Face tensor."""
        key, numbers = _key_and_numbers(name)
        layers = model.num_layers
        predicts = bool(numbers) and numbers[0] >= layers
        rows = [row for row in self._by_key[1].get(key, ()) if row.is_in(model, numbers)]
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


def in_layers(
    names: Mapping[str, str], change: TensorChange = SAME, ends: Iterable[str] = ("weight",)
) -> list[GgufRow]:
    """A row for each module in a layer and each end of its tensors' names."""
    return [
        GgufRow(f"model.layers.{{layer}}.{hf}.{end}", (f"blk.{{layer}}.{gguf}.{end}",), change)
        for hf, gguf in names.items()
        for end in ends
    ]


def in_layer(hf: str, gguf: str, change: TensorChange = SAME) -> GgufRow:
    """The row of a tensor in a layer."""
    return GgufRow(f"model.layers.{{layer}}.{hf}", (f"blk.{{layer}}.{gguf}",), change)


def replaced_by(hf: str, gguf: Sequence[str], change: TensorChange) -> GgufRow:
    """The row of a module in a layer that is several in GGUF."""
    return GgufRow(
        f"model.layers.{{layer}}.{hf}.weight", tuple(f"blk.{{layer}}.{each}.weight" for each in gguf), change
    )


def linears(names: Mapping[str, str], change: TensorChange = SAME) -> list[GgufRow]:
    return in_layers(names, change, ("weight", "bias"))


GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
W123 = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}


def shared_expert(module: str) -> list[GgufRow]:
    """The rows of a gated expert that all tokens go to."""
    return in_layers({f"{module}.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()})


def experts(modules: str, names: Mapping[str, str] = GATED) -> list[GgufRow]:
    """A row for each matrix of an expert. `modules` is what its modules' names begin with, `names` are those of the
    matrices, with GGUF's of an MLP's."""
    return [
        GgufRow(f"model.layers.{{layer}}.{modules}.{{expert}}.{hf}.weight", (stack(f"{gguf}_exps"),))
        for hf, gguf in names.items()
    ]


def stack(name: str, end: str = "weight") -> str:
    return f"blk.{{layer}}.{name}.{end}[{{expert}}]"


def in_delta_nets(model: ModelShape, layer: int) -> bool:
    """Whether the layer has a delta net in the place of attention."""
    return layer < model.num_layers and model.has_delta_net(layer)


def outside_delta_nets(model: ModelShape, layer: int) -> bool:
    return not in_delta_nets(model, layer)


def renamed(rows: Iterable[GgufRow], names: Mapping[str, str]) -> list[GgufRow]:
    """The same rows under other names in Hugging Face, of which these are parts."""
    found = []
    for row in rows:
        name = row.hf
        for old, new in names.items():
            name = name.replace(old, new)
        found.append(replace(row, hf=name))
    return found


def in_prediction(rows: Iterable[GgufRow]) -> list[GgufRow]:
    """The same rows in layers of multi-token prediction that have numbers and names of their own."""
    return [
        GgufRow(
            row.hf.replace("model.layers.{layer}.", "mtp.layers.{mtp}."),
            tuple(name.replace("{layer}", "{mtp_layer}") for name in row.gguf),
            row.change,
        )
        for row in rows
    ]


def outside_layers(final_norm: TensorChange = SAME) -> list[GgufRow]:
    """What is not in layers. Without `output` the embedding is the output layer too."""
    return [
        GgufRow("model.embed_tokens.weight", ("token_embd.weight",)),
        GgufRow("model.norm.weight", ("output_norm.weight",), final_norm),
        GgufRow("lm_head.weight", ("output.weight",)),
    ]


FINAL_NORM_BIAS = GgufRow("model.norm.bias", ("output_norm.bias",))

SCALED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
SCALED_EXPERTS, SCALED_SHARED_EXPERT = (
    tuple(f"ffn_{each}{of}" for each in ("gate", "up", "down")) for of in ("_exps", "_shexp")
)
"""Modules that llama.cpp multiplies by global scales, in the families whose graphs do."""

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NORMS_BY_PLACE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
NORMS_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
FOUR_NORMS = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **NORMS_BEHIND}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

QUERY, KEY = {"self_attn.q_proj": "attn_q"}, {"self_attn.k_proj": "attn_k"}
VALUE_OUTPUT = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
ATTENTION = linears({**QUERY, **KEY, **VALUE_OUTPUT})
ATTENTION_IN_PAIRS = [*linears({**QUERY, **KEY}, ROTARY_NEIGHBOURS), *linears(VALUE_OUTPUT)]

MLP = linears({f"mlp.{hf}": gguf for hf, gguf in GATED.items()})
JOINED_MLP = linears({"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"})
ROUTER = in_layers({"mlp.gate": "ffn_gate_inp"})
EXPERTS = experts("mlp.experts")
SHARED_EXPERT = shared_expert("mlp.shared_expert")
SHARED_EXPERT_GATE = in_layers({"mlp.shared_expert_gate": "ffn_gate_inp_shexp"})
SHARED_EXPERTS = shared_expert("mlp.shared_experts")
CORRECTION = ("blk.{layer}.exp_probs_b.bias",)
EXPERT_BIAS = GgufRow("model.layers.{layer}.mlp.gate.e_score_correction_bias", CORRECTION)
UNGATED_MLP = linears({"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"})
EXPERTS_OF_MIXTRAL = [
    *in_layers({"block_sparse_moe.gate": "ffn_gate_inp"}),
    *experts("block_sparse_moe.experts", W123),
]

DECODER = [*outside_layers(), *in_layers(NORMS), *ATTENTION]
DECODER_IN_PAIRS = [*outside_layers(), *in_layers(NORMS), *ATTENTION_IN_PAIRS]
"""All but MLPs and experts, of most models."""
PREDICTION = in_layers(
    {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
        "embed_tokens": "nextn.embed_tokens",
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
)
"""What a layer of multi-token prediction has beside a decoder's."""
