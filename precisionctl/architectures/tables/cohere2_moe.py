"""Command A+ and North Mini: Command A with experts beside attention, which read the one norm of a layer too.

Traps: `intermediate_size` is an expert's, and dense layers have a size of their own; in these `layer_types` does not
say alone where rotary embeddings are. Norms are RMSNorms where `rms_norm_eps` is said. Routed and shared experts are
averaged, or added.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import layers_in_window, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.cohere import COMMON, LAST_NORM, NORM
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_DENSE, _PATTERN, _OF_DENSE = "first_k_dense_replace", "sliding_window_pattern", "prefix_dense_sliding_window_pattern"


def _local(config: keys.Config, number: int) -> list[bool]:
    said = {_PATTERN: 4, _OF_DENSE: 1} | dict(config)
    dense = 0 if config.get(_DENSE) in (None, 0) else keys.size(config, _DENSE, number)
    lengths = {_OF_DENSE: dense, _PATTERN: number - dense}
    return [(layer + 1) % keys.size(said, key) != 0 for key, each in lengths.items() for layer in range(each)]


_LENGTH = 4096  # where none is said
_WINDOW = sliding_window(_local, absent=_LENGTH, null_is_none=True, also=(_DENSE, _PATTERN, _OF_DENSE))
_LAYERS = deepseek_keys.experts_by_list(dense=0, key=_DENSE)


def _read_layers(config: keys.Config) -> keys.Fields:
    fields = {**_LAYERS.read(config), **_WINDOW.read(config)}
    in_window = layers_in_window(config, _local)
    if config.get("sliding_window", _LENGTH) is None:
        in_window = [False] * keys.layers(config)
    dense_have = keys.size(config, _OF_DENSE, absent=1) == 1
    each = zip(in_window, fields["moe.layer_freq"], strict=True)
    rope_layers = tuple(window or (dense_have and not experts) for window, experts in each)
    return {**fields, "rope_layers": rope_layers}


def _write_layers(model: ModelShape) -> keys.Config:
    dense = [layer for layer in range(model.num_layers) if not model.has_experts(layer)]
    without = [layer for layer in dense if model.rope_layers and not model.rope_layers[layer]]
    return {**_LAYERS.write(model), **_WINDOW.write(model), _OF_DENSE: 2 if without else 1}


def _read_sizes(config: keys.Config) -> keys.Fields:
    expert = keys.size(config, "intermediate_size")
    own = config.get("prefix_dense_intermediate_size") is not None
    dense = keys.size(config, "prefix_dense_intermediate_size") if own else expert
    fields: dict[str, object] = {"moe.ffn_hidden_size": expert, "ffn_hidden_size": dense}
    if not keys.count(config, "num_shared_experts"):
        return fields
    strategy = config.get("shared_expert_combination_strategy", "average")
    if strategy not in ("average", "sum"):
        what = f"shared_expert_combination_strategy={shown(strategy)}"
        raise UnknownArchitecture(what, do="Known are `average` and `sum`.")
    fields["moe.shared_ffn_hidden_size"] = keys.size(config, "num_shared_experts") * expert
    return {**fields, "moe.shared_average": strategy == "average"}


def _write_sizes(model: ModelShape) -> keys.Config:
    if model.moe is None:
        return {}
    expert, shared = model.moe.ffn_hidden_size, model.moe.shared_ffn_hidden_size
    strategy = {"shared_expert_combination_strategy": "average" if model.moe.shared_average else "sum"}
    sizes = {"intermediate_size": expert, "prefix_dense_intermediate_size": model.ffn_hidden_size}
    return {**sizes, "num_shared_experts": (shared or 0) // expert, **(strategy if shared else {})}


def _read_router(config: keys.Config) -> keys.Fields:
    function = config.get("expert_selection_fn", "softmax")
    if function not in ("softmax", "sigmoid"):
        what = f"expert_selection_fn={shown(function)}"
        raise UnknownArchitecture(what, do="Known are `softmax` and `sigmoid`.")
    apart = function == "sigmoid" and not keys.is_on(config, "norm_topk_prob", True)
    return {"moe.score_function": function, "moe.pre_softmax": apart}


def _write_router(model: ModelShape) -> keys.Config:
    if model.moe is None:
        return {}
    return {"expert_selection_fn": model.moe.score_function, "norm_topk_prob": not model.moe.pre_softmax}


_ROPE = rope()


def _read_rope(config: keys.Config) -> keys.Fields:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is not None:
        what = f"rope_scaling is {shown(config['rope_scaling'])}, and transformers passes over it"
        raise DamagedCheckpoint(what, do="Say it as `rope_parameters`, with `rope_theta` in them.")
    return _ROPE.read({**config, "rope_scaling": None})


def _read_norm(config: keys.Config) -> keys.Fields:
    epsilon = config.get("rms_norm_eps")
    if epsilon is not None:
        return {"normalization": "RMSNorm", "norm_epsilon": real(epsilon, "rms_norm_eps")}
    epsilon = real(config.get("layer_norm_eps", 1e-5), "layer_norm_eps")
    return {"normalization": "LayerNorm", "norm_epsilon": epsilon}


ARCHITECTURE = Architecture(
    model_types={"cohere2_moe": "Cohere2MoeForCausalLM"},
    rows=llama.model_rows(
        *NORM, *llama.ATTENTION, *llama.MLP, *moe.ROUTER, *moe.SHARED_EXPERTS, *moe.EXPERTS, ending=LAST_NORM
    ),
    config=(
        *COMMON,
        keys.heads(head_dim=128),
        keys.only("use_qk_norm", False),
        keys.only("use_parallel_block", True),
        keys.Rule(
            ("rms_norm_eps", "layer_norm_eps"),
            _read_norm,
            lambda model: {"layer_norm_eps" if model.layer_norms else "rms_norm_eps": model.norm_epsilon},
        ),
        keys.Key("moe.num_experts", "num_experts", 8),
        keys.Key("moe.topk", "num_experts_per_tok", 2),
        keys.Rule(
            (
                *("intermediate_size", "prefix_dense_intermediate_size", "num_shared_experts"),
                "shared_expert_combination_strategy",
            ),
            _read_sizes,
            _write_sizes,
        ),
        keys.Rule(("expert_selection_fn", "norm_topk_prob"), _read_router, _write_router),
        keys.Rule(
            _ROPE.keys,
            _read_rope,
            lambda model: {
                "rope_parameters": {
                    **(model.rope_scaling or {"rope_type": "default"}),
                    "rope_theta": model.rotary_base,
                }
            },
        ),
        keys.Rule((*_LAYERS.keys, *_WINDOW.keys), _read_layers, _write_layers),
    ),
    names_by="this project",
)
