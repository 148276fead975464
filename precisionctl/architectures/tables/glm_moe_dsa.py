"""GLM-5: DeepSeek-V3.2 whose indexer may serve the layers after it.

Traps: a layer without an indexer sees the keys that the last one chose; the indexer's rotary channels are neighbouring
pairs, too.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows
from precisionctl.architectures.tables.deepseek_v32 import COMMON, ROWS
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_shape import ModelShape

_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def _read_layers(config: keys.Config) -> keys.Fields:
    key = next((key for key in ("indexer_types", "index_topk_pattern") if config.get(key) is not None), None)
    if key is None:
        every = max(keys.whole(config, "index_topk_freq", 1), 1)
        after = keys.whole(config, "index_skip_topk_offset", 2)
        numbers = range(keys.layers(config))
        return {"dsa.layers": tuple(max(layer - after + 1, 0) % every == 0 for layer in numbers)}
    said = [*config[key]] if isinstance(config[key], str) else config[key]
    listed = keys.as_list(said, key, "`full` and `shared`", kinds=(str,))
    if not _KINDS.keys() >= {*listed}:
        raise DamagedCheckpoint(f"{key} is {shown(config[key])}, not a list of `full` and `shared`")
    return {"dsa.layers": tuple(_KINDS[kind] for kind in listed)}


def write_indexers(model: ModelShape) -> keys.Config:
    """Which layers have one, by words."""
    return {"indexer_types": ["full" if indexed else "shared" for indexed in model.dsa.layers]} if model.dsa else {}


def _write_layers(model: ModelShape) -> keys.Config:
    """By words and, for vLLM, by letters."""
    said = write_indexers(model)
    return {**said, "index_topk_pattern": "".join(word[0].upper() for word in said.get("indexer_types", ()))}


INDEXERS = keys.Rule(
    ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"), _read_layers, write_indexers
)
"""Which layers have one."""

ARCHITECTURE = Architecture(
    model_types={"glm_moe_dsa": "GlmMoeDsaForCausalLM"},
    behind={"gate": "experts"},
    rows=ROWS,
    config=(
        *deepseek_keys.latent_attention(2048),
        *COMMON,
        keys.Key("dsa.n_heads", "index_n_heads", 32),
        keys.only("indexer_rope_interleave", True, "dsa.rope_interleaved", True),
        keys.Rule(INDEXERS.keys, INDEXERS.read, _write_layers),
        deepseek_keys.groups(1, 1),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
    ),
    aliases=(TIED, *deepseek_rows.MTP_ALIASES),
)
