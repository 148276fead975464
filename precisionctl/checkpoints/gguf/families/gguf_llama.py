"""Llama and those whose graph is Llama's: Mistral, InternLM3, IQuest-Coder, Mixtral, SmolLM3, Ministral 3; and Llama 4.

Sources: llama.cpp's src/models/llama.cpp, smollm3.cpp, mistral3.cpp and llama4.cpp, and conversion/llama.py,
mistral3.py and llama4.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import AS_LARGE_AS_MLP, EXPERT_COUNTS, EXPERT_SIZE, IN_ALL_LAYERS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    ATTENTION_BIAS,
    HEAD_SIZE,
    MLP_BIAS,
    NO_EXPERTS,
    NO_WINDOW,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    GgufRule,
    Said,
    every,
    refused,
)
from precisionctl.checkpoints.gguf.rope_keys import (
    AND_LLAMA3,
    BEYOND_CONTEXT,
    QUERY_SCALING,
    TURNED,
    WHOLE_MULTIPLIER,
    mscales,
)
from precisionctl.checkpoints.gguf.tensor_rows import (
    DECODER,
    DECODER_IN_PAIRS,
    EXPERTS_OF_MIXTRAL,
    GATED,
    MLP,
    SCALED,
    SCALED_EXPERTS,
    experts,
    in_layers,
)
from precisionctl.model.model_shape import ModelShape

_LLAMA = GgufFamily(
    "llama",
    rows=[*DECODER_IN_PAIRS, *MLP],
    keys=(*base_keys(), HEAD_SIZE),
    more=(VOCABULARY, TURNED, ATTENTION_BIAS, MLP_BIAS),
    reads=(NO_EXPERTS,),
    ignored=NO_WINDOW,
    scalings=AND_LLAMA3,
    scaled=SCALED,
    recognises=lambda file: not file.count("expert_count", 0),
)
_AS_LLAMA = replace(_LLAMA, recognises=lambda file: False)
"""Those whose files say that they are Llamas, and are read as such."""

# Llama 4


def _read_step(file: Described) -> Fields:
    step = file.count("interleave_moe_layer_step", least=1)
    return {"moe.layer_freq": tuple((layer + 1) % step == 0 for layer in range(file.layers()))}


def _write_step(model: ModelShape) -> Said:
    assert model.moe
    experts = model.moe.layer_freq
    step = experts.index(True) + 1 if True in experts else 0
    if not step or experts != tuple((layer + 1) % step == 0 for layer in range(len(experts))):
        raise refused(model, "with experts in other layers than each of some number")
    return {"interleave_moe_layer_step": step}


_STEP = GgufRule(("moe.layer_freq",), ("interleave_moe_layer_step",), _read_step, _write_step)


def _blends_none(scaling: Fields) -> Fields:
    """Between the frequencies that Llama 3's scaling divides and those that it leaves, its releases have none."""
    unsaid = scaling.get("rope_type") == "llama3" and "high_freq_factor" not in scaling
    return {"high_freq_factor": 1.0} if unsaid else {}


FAMILIES = {
    "llama": _LLAMA,
    "mistral": _AS_LLAMA,
    "iquestcoder": _AS_LLAMA,
    "internlm3": replace(_AS_LLAMA, scalings={**AND_LLAMA3, **BEYOND_CONTEXT}),
    "mixtral": GgufFamily(
        "llama",
        rows=[*DECODER_IN_PAIRS, *EXPERTS_OF_MIXTRAL],
        keys=(*base_keys(*EXPERT_COUNTS), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, TURNED),
        reads=(),
        computed={**IN_ALL_LAYERS, **AS_LARGE_AS_MLP},
        ignored=NO_WINDOW,
        recognises=lambda file: file.count("expert_count", 0) > 0,
        scaled=(*SCALED, *SCALED_EXPERTS),
    ),
    "ministral3": GgufFamily(
        "mistral3",
        rows=[*DECODER_IN_PAIRS, *MLP],
        keys=(*base_keys(), HEAD_SIZE),
        more=(VOCABULARY, TURNED, WHOLE_MULTIPLIER, QUERY_SCALING),
        reads=(),
        ignored=NO_WINDOW,
        reads_betas=True,
        of_scaling=mscales(needed=False),
        scaled=SCALED,
    ),
    "smollm3": GgufFamily(
        "smollm3",
        rows=[*DECODER_IN_PAIRS, *MLP],
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, TURNED),
        reads=(ATTENTION_BIAS, MLP_BIAS),
        computed={"rope_layers": every(4)},
    ),
    "llama4_text": GgufFamily(
        "llama4",
        rows=[
            *DECODER,
            *in_layers({f"feed_forward.{hf}": gguf for hf, gguf in GATED.items()}),
            *in_layers({f"feed_forward.shared_expert.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
            *in_layers({"feed_forward.router": "ffn_gate_inp"}),
            *experts("feed_forward.experts", {hf: f"{gguf}_exps" for hf, gguf in GATED.items()}),
        ],  # its experts are `[out, in]` in GGUF, and so under the names that their codes have, one by one
        keys=(*base_keys(*EXPERT_COUNTS), HEAD_SIZE),
        more=(VOCABULARY, TURNED, _STEP, EXPERT_SIZE),
        reads=(),
        computed={
            "rotary_interleaved": True,
            "rope_layers": every(4),
            "attention_chunk_size": 8192,
            "window_layers": every(4),
            "query_scaling_beta": 0.1,
            "query_scaling_floor": 8192,
            "qk_l2_norm": lambda fields: fields["moe.num_experts"] != 128,
            "moe.shared_ffn_hidden_size": lambda fields: fields["moe.ffn_hidden_size"],
            "moe.score_function": "sigmoid",
            "moe.probs_on_input": True,
        },
        scalings=AND_LLAMA3,
        of_scaling=_blends_none,
    ),
}
"""By the `model_type` of the text model."""
