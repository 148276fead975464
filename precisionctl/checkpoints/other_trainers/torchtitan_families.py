"""What torchtitan calls the tensors of its families, and Hugging Face.

The names are those of torchtitan 0.3.0, in the adapter of each of its models (`state_dict_adapter.py`), and of Llama 4,
which it no longer has, those of 0.2.2. The adapter of gpt-oss leaves out the experts: their names are those of
models/gpt_oss/moe.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from precisionctl.model.model_shape import ModelShape

EMBEDDINGS = ("tok_embeddings.weight", "tok_embeddings.embedding.weight")
"""A tensor that shows names to be torchtitan's; the second is Muse Glimmer's, which are not read."""

GATE, BIAS = "moe.router.gate.weight", "moe.expert_bias_E"
"""The weight of a router, and the bias by which torchtitan balances its experts, in their layer."""


@dataclass(frozen=True)
class TorchtitanFamily:
    """A family in torchtitan.

    `names` are its modules, those inside a layer too, and parameters that are no module's weight or bias, with Hugging
    Face's name. Experts are one tensor `[experts, out, in]`; `{expert}` is their number where Hugging Face has a tensor
    for each. None is a buffer that Hugging Face's class has no place for. `pairs` says that the two numbers of a rotary
    pair are in neighbouring rows of queries and keys, `biases` that linears have some, and `current` that the newest
    torchtitan has the family.
    """

    names: Mapping[str, str | None]
    pairs: bool = False
    biases: bool = False
    current: bool = True

    def hf_name(self, name: str, model: ModelShape) -> str | None:
        """Hugging Face's name for torchtitan's, or for that of an older release; None where it has no place for it. Any
        other name stays as it is."""
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        inside, layer, kind, expert = match["inside"], match["layer"], match["kind"] or "", match["expert"]
        inside = inside if inside in self.names else _OLDER.get(inside, inside)
        if inside not in self.names or not self._can_be(inside, layer, kind):
            return name
        hf = self.names[inside]
        if hf is None:
            return None
        if expert is not None:
            hf = hf.replace("{expert}", expert) if "{expert}" in hf else f"{hf}[{expert}]"
        elif "{expert}" in hf:
            return name
        if layer is not None:
            hf = f"layers.{int(layer) + (model.num_layers if match['mtp'] else 0)}.{hf}"
        return f"{hf}{kind}" if inside == _HEAD else f"model.{hf}{kind}"

    def titan_name(self, name: str, model: ModelShape) -> str | None:
        """torchtitan's name for Hugging Face's; None for what it has not."""
        match = _HF_NAME.fullmatch(name)
        if match is None:
            return None
        inside, layer, kind, expert = match["inside"], match["layer"], match["kind"] or "", match["expert"]
        if numbered := _NUMBER_OF_EXPERT.search(inside):
            inside, expert, kind = _NUMBER_OF_EXPERT.sub("experts.{expert}.", inside) + kind, numbered[1], ""
        titan = next((titan for titan, hf in self.names.items() if hf == inside), None)
        if titan is None or not self._can_be(titan, layer, kind):
            return None
        later = int(layer or 0) - model.num_layers
        place = "" if layer is None else f"layers.{layer}." if later < 0 else f"mtp_layers.{later}."
        return f"{place}{titan}{kind}" if expert is None else f"{place}{titan}{kind}[{expert}]"

    def _can_be(self, inside: str, layer: str | None, kind: str) -> bool:
        return (inside in _ENDS) == (layer is None) and (self.biases or kind != ".bias")


_NAME = re.compile(
    r"(?:(?P<mtp>mtp_)?layers\.(?P<layer>\d{1,9})\.)?(?P<inside>.+?)(?P<kind>\.weight|\.bias)?(?:\[(?P<expert>\d+)\])?"
)

_HF_NAME = re.compile(
    r"(?:model\.)?(?:layers\.(?P<layer>\d{1,9})\.)?(?P<inside>.+?)(?P<kind>\.weight|\.bias)?(?:\[(?P<expert>\d+)\])?"
)
_NUMBER_OF_EXPERT = re.compile(r"experts\.(\d+)\.")

_HEAD = "lm_head"
_ENDS = {"tok_embeddings": "embed_tokens", "norm": "norm", _HEAD: "lm_head"}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    **{f"attention.qkv_linear.w{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attention.wo": "self_attn.o_proj",
}
_HEAD_NORMS = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP = {f"feed_forward.{titan}": f"mlp.{hf}" for titan, hf in _PROJECTIONS.items()}
_LLAMA: Mapping[str, str] = {**_ENDS, **_NORMS, **_ATTENTION, **_MLP}

_ROUTER, _STACK = GATE.removesuffix(".weight"), "moe.routed_experts.inner_experts"
_STACKS = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
_EXPERTS = {
    _ROUTER: "mlp.gate",
    **{f"{_STACK}.{_STACKS[titan]}": f"mlp.experts.{{expert}}.{hf}.weight" for titan, hf in _PROJECTIONS.items()},
}
_SHARED_EXPERTS = {f"moe.shared_experts.{titan}": f"mlp.shared_experts.{hf}" for titan, hf in _PROJECTIONS.items()}

_LATENT_ATTENTION = {
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
}
_DEEPSEEK: Mapping[str, str] = {**_ENDS, **_NORMS, **_LATENT_ATTENTION, **_MLP, **_EXPERTS, **_SHARED_EXPERTS}
_PREDICTION = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "mtp_norm": "shared_head.norm"}

_GPT_OSS_EXPERTS = {
    "mlp1_weight_EGD": "gate_up_proj_blocks",
    "mlp1_bias_EG": "gate_up_proj_bias",
    "mlp2_weight_EDF": "down_proj_blocks",
    "mlp2_bias_ED": "down_proj_bias",
}
"""`[out, in]`, as Hugging Face has the codes of a release, and not the values."""


_LLAMA4 = {
    titan: hf.replace("mlp.", "feed_forward.").replace("shared_experts", "shared_expert")
    for titan, hf in {**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS}.items()
}
_DEEPSEEK_V3 = TorchtitanFamily({**_DEEPSEEK, **_PREDICTION, BIAS: "mlp.gate.e_score_correction_bias"})

FAMILIES: Mapping[str, TorchtitanFamily] = {
    "llama": TorchtitanFamily(_LLAMA, pairs=True),
    "qwen3": TorchtitanFamily({**_LLAMA, **_HEAD_NORMS}),
    "qwen3_moe": TorchtitanFamily({**_LLAMA, **_HEAD_NORMS, **_EXPERTS, BIAS: None}),
    "deepseek_v2": TorchtitanFamily({**_DEEPSEEK, BIAS: None}),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": TorchtitanFamily(
        {
            **_LLAMA,
            "attention.sinks": "self_attn.sinks",
            _ROUTER: "mlp.router",
            BIAS: None,
            **{f"{_STACK}.{titan}": f"mlp.experts.{hf}" for titan, hf in _GPT_OSS_EXPERTS.items()},
        },
        biases=True,
    ),
    "llama4_text": TorchtitanFamily({**_LLAMA4, _ROUTER: "feed_forward.router", BIAS: None}, current=False),
}
"""By the `model_type` of Hugging Face's model."""

_OLDER = {
    "output": _HEAD,
    **{f"attention.w{one}": f"attention.qkv_linear.w{one}" for one in "qkv"},
    "moe.expert_bias": BIAS,
    **{f"moe.experts.{name}": f"{_STACK}.{newer}" for name, newer in _STACKS.items()},
    **{f"moe.experts.{newer.rpartition('_')[0]}": f"{_STACK}.{newer}" for newer in _GPT_OSS_EXPERTS},
}
"""Names up to torchtitan 0.2.2, of the same tensors."""
