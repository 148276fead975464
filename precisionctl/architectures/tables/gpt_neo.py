"""GPT-Neo (and TinyStories): GPT-2 with separate projections without biases, scores that are not scaled, and a window
in the layers that `attention_types` lists.

Traps: matrices are stored `[out, in]`, other than GPT-2's. transformers goes by `attention_layers`, which repeats what
`attention_types` says in short, where config.json has it.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Alias, Architecture, renamed
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.tables.gpt2 import ACTIVATION, OF_LINEARS, sizes
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import MOST_LAYERS, check_count
from precisionctl.model.model_shape import ModelShape

_ATTENTION = "transformer.h.{layer}.attn.attention."
_KINDS = {"global": False, "local": True}


def _expanded(listed: object) -> list[object]:
    """Kinds of layers: of each pair, the first, a list of kinds, as often as the second says."""
    kinds: list[object] = []
    for pair in listed if isinstance(listed, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list):
            what = f"attention_types is {shown(listed)}, not a list of kinds and how often they are repeated"
            raise DamagedCheckpoint(what)
        check_count(pair[1], "attention_types", MOST_LAYERS)
        if len(kinds) + len(pair[0]) * pair[1] > MOST_LAYERS:
            raise DamagedCheckpoint(f"attention_types lists more than {MOST_LAYERS} layers")
        kinds += pair[0] * pair[1]
    return kinds


def _read_layers(config: keys.Config) -> keys.Fields:
    said, number = config.get("attention_types"), keys.layers(config, "num_layers")
    kinds = _expanded([[["global", "local"], 12]] if said is None else said)
    if config.get("attention_layers", kinds) != kinds:
        what = f"attention_layers is {shown(config['attention_layers'])}, and attention_types says otherwise"
        raise DamagedCheckpoint(what, do="Say the same in both.")
    if len(kinds) != number:
        raise DamagedCheckpoint(f"attention_types lists {len(kinds)} of {number} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS:
            what = f"layers of type {shown(kind)} in attention_types"
            raise UnknownArchitecture(what, do=f"Known: {', '.join(_KINDS)}.")
    windows = tuple(_KINDS[str(kind)] for kind in kinds)
    if not any(windows):
        return {}
    window = keys.size(config, "window_size", absent=256)
    return {"sliding_window": window, "window_layers": windows}


def _write_layers(model: ModelShape) -> keys.Config:
    kinds = ["local" if model.in_window(layer) else "global" for layer in range(model.num_layers)]
    window = {} if model.sliding_window is None else {"window_size": model.sliding_window}
    return {"attention_types": [[kinds, 1]], "attention_layers": kinds, **window}


ARCHITECTURE = Architecture(
    model_types={"gpt_neo": "GPTNeoForCausalLM"},
    behind={"q_proj": "v_proj"},
    rows=(
        *renamed(
            tuple(row for row in OF_LINEARS if ".linear_qkv." not in row.megatron or ".layer_norm_" in row.megatron),
            {".attn.c_proj.": ".attn.attention.out_proj."},
        ),
        *renamed(llama.QKV_LINEAR, {"model.layers.{layer}.self_attn.": _ATTENTION}),
        *llama.OUTPUT,
    ),
    config=(
        sizes("num_layers", "hidden_size", "num_heads", "intermediate_size"),
        keys.synonyms({"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}),
        keys.Key("max_position_embeddings", "max_position_embeddings", 2048),
        keys.VOCABULARY,
        ACTIVATION,
        keys.always("gated_linear_unit", False),
        keys.always("normalization", "LayerNorm"),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        keys.always("position_embedding", "learned_absolute"),
        keys.always("query_pre_attn_scalar", 1.0),
        keys.always("proj_bias", True),
        keys.always("mlp_bias", True),
        keys.Rule(("attention_types", "attention_layers", "window_size"), _read_layers, _write_layers),
        keys.tied(True),
    ),
    aliases=(Alias("lm_head.weight", of="transformer.wte.weight", switch="tied_embeddings"),),
    derived=(f"{_ATTENTION}bias", f"{_ATTENTION}masked_bias"),
)
