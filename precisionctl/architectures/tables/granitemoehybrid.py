"""Granite 4: a Mamba-2 mixer or attention, then an MLP or experts with a shared one, by Granite's multipliers.

In Megatron each of the two blocks is a layer of the hybrid stack, with its own norm: layer i of Hugging Face is the
layers 2i and 2i + 1 there, so a model of mixers and experts has the pattern MEME..., a dense one of attention *-*-....
So does Megatron's own guide (docs/user-guide/hybrid-model-migration.md).

Traps: without experts the MLP is still called the shared one, has `shared_intermediate_size`, and `intermediate_size`
means nothing; transformers 5 has other words for kinds of layers than published files (which it reads), and only the
published ones are known to all versions and engines; attention has positions only where config.json says `rope`.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import Architecture, only_in, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.mamba_keys import MIXER, step_limits
from precisionctl.architectures.shared.mamba_rows import FINAL_NORM, MIXER_OR_ATTENTION
from precisionctl.architectures.tables.granite import MULTIPLIERS
from precisionctl.architectures.tables.granitemoe import EXPERTS
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_NAMES = {
    "{layer}": "{hf_layer}",
    ".mixer.": ".mamba.",
    ".mlp.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
}
_BLOCKS = (
    *MIXER_OR_ATTENTION,
    *llama.MLP_NORM,
    *only_in("dense", llama.JOINED_MLP),
    *moe.MOE_NORM,
    *moe.JOINED_SHARED_EXPERT,
)

_KINDS = {"mamba": True, "attention": False, "linear_attention": True, "full_attention": False}
_LISTED = keys.Key("layer_types", "layer_types", None, synonym="layers_block_type")
_DEFAULTS = {
    "hidden_size": 4096,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 11008,
    "shared_intermediate_size": 1024,
}
"""What its class takes for keys that are not there."""


def _read_layers(config: keys.Config) -> keys.Fields:
    config = {**_DEFAULTS, **config, **_LISTED.read(config)}
    mixers = listed_layers(config, _KINDS) or [True] * keys.layers(config)
    experts, shared = keys.count(config, "num_local_experts"), keys.size(config, "shared_intermediate_size")
    pattern = "".join(("M" if mixer else "*") + ("E" if experts else "-") for mixer in mixers)
    fields = {"num_layers": len(pattern), "mamba.pattern": pattern}
    if not experts:
        return fields | {"ffn_hidden_size": shared}
    ffn = keys.size(config, "intermediate_size")
    return fields | {
        "ffn_hidden_size": ffn,
        "moe.num_experts": experts,
        "moe.topk": keys.size(config, "num_experts_per_tok"),
        "moe.ffn_hidden_size": ffn,
        "moe.shared_ffn_hidden_size": shared,
        "moe.layer_freq": tuple(block == "E" for block in pattern),
    }


def _write_layers(model: ModelShape) -> keys.Config:
    kinds = ["mamba" if block == "M" else "attention" for block in model.mamba.pattern[::2]] if model.mamba else []
    config = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    if model.moe is None:
        sizes = dict.fromkeys(("intermediate_size", "shared_intermediate_size"), model.ffn_hidden_size)
        return config | sizes | dict.fromkeys(("num_local_experts", "num_experts_per_tok"), 0)
    return config | {
        "intermediate_size": model.moe.ffn_hidden_size,
        "shared_intermediate_size": model.moe.shared_ffn_hidden_size,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.topk,
    }


def _read_positions(config: keys.Config) -> keys.Fields:
    said = config.get("position_embedding_type")
    if said not in (None, "nope", "rope"):
        what = f"no granitemoehybrid known here has position_embedding_type={shown(said)}"
        raise UnknownArchitecture(what, do="Known are rope, nope and null.")
    return {"rope_layers": None if said == "rope" else (False,) * (2 * keys.layers(config))}


ARCHITECTURE = Architecture(
    model_types={"granitemoehybrid": "GraniteMoeHybridForCausalLM"},
    behind={"self_attn": "shared_mlp"},
    rows=llama.model_rows(*renamed(_BLOCKS, _NAMES), EXPERTS.renamed(_NAMES), ending=FINAL_NORM),
    config=(
        keys.Rule(
            ("num_hidden_layers", *_LISTED.keys, "intermediate_size", "shared_intermediate_size")
            + ("num_local_experts", "num_experts_per_tok"),
            _read_layers,
            _write_layers,
        ),
        keys.Rule(
            ("position_embedding_type",),
            _read_positions,
            lambda model: {"position_embedding_type": "nope" if model.rope_layers else "rope"},
        ),
        keys.Key("hidden_size", "hidden_size", 4096),
        keys.Key("max_position_embeddings", "max_position_embeddings", 2048),
        keys.VOCABULARY,
        keys.HEADS,
        *MIXER,
        step_limits("time_step_limit"),
        keys.only("attention_bias", False),
        keys.SILU,
        *MULTIPLIERS,
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
)
