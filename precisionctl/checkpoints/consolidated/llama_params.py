"""config.json made of Meta's params.json: Llama 1, 2, Code Llama, and 3 to 3.2 (text).

Sources: meta-llama/llama, llama/model.py; meta-llama/llama-models, models/llama3/args.py, model.py and tokenizer.py;
transformers 4.56, models/llama/convert_llama_weights_to_hf.py.

Traps: the size of the MLP follows from a formula; a vocabulary of -1 is the tokenizer's; scaled rotary embeddings have
no factor in the file: it is 8 in Meta's code and Llama 3.1, and 32 where Meta publishes Llama 3.2 1B and 3B.
"""

from typing import Any

from precisionctl.architectures.config_keys import is_on, size
from precisionctl.architectures.rope import LLAMA3
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.consolidated.params import MadeConfig, ParamsJson
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_parts import LARGEST, check_size, real
from precisionctl.param import TensorSpec

_LLAMA_3_2 = {(2048, 16), (3072, 28)}
"""Sizes and layers of those with another factor."""

_POSITIONS = {500000.0: 8192, 1000000.0: 16384}
"""The longest text of Llama 3 and Code Llama, by their rotary base. Of Llama 3.1 and later it is 131072, of 2 4096."""

_VOCABULARY_OF_3, _BEGIN, _END = 128256, 128000, 128001


def llama_config(said: ParamsJson, embedding: TensorSpec, *, has_head: bool) -> MadeConfig:
    """The config.json of a model that a params.json describes, with this `embedding`, whole. Raises as
    `mistral_params.mistral_config`."""
    said.skip("max_batch_size", "max_seq_len")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": said.take("dim"),
        "num_hidden_layers": said.take("n_layers"),
        "num_attention_heads": said.take("n_heads"),
        "rms_norm_eps": said.take("norm_eps"),
    }
    config["num_key_value_heads"] = said.take("n_kv_heads", config["num_attention_heads"])
    vocabulary = said.take("vocab_size", -1)
    config["vocab_size"] = embedding.rows if vocabulary == -1 else vocabulary
    config["intermediate_size"] = _intermediate_size(said, size(config, "hidden_size", said.where))
    theta, notes = real(said.take("rope_theta", 10000.0), "rope_theta", said.where), list[str]()
    scaled = is_on({"use_scaled_rope": said.take("use_scaled_rope", False)}, "use_scaled_rope", said.where)
    config["rope_theta"] = theta
    if scaled:
        config["rope_scaling"] = {"rope_type": "llama3", "factor": _factor(said, config), **LLAMA3}
    if said.known:
        config["max_position_embeddings"] = said.known.max_position_embeddings
    else:
        config["max_position_embeddings"] = positions = 131072 if scaled else _POSITIONS.get(theta, 4096)
        notes.append(f"params.json does not say how long a text may be: {positions} is written, as of such a Llama.")
    config["tie_word_embeddings"] = not has_head
    if config["vocab_size"] == _VOCABULARY_OF_3:
        config |= {"bos_token_id": _BEGIN, "eos_token_id": _END}
        notes.append(f"A text ends with token {_END}, as of a base model; a chat model's may end with 128009 too.")
    said.check_read()
    return MadeConfig(config, tuple(notes))


def _intermediate_size(said: ParamsJson, dim: int) -> int:
    """Two thirds of four times the hidden size, times a number, rounded up (llama/model.py, FeedForward)."""
    unit, more = said.take("multiple_of", 256), said.take("ffn_dim_multiplier", 1)
    check_size(unit, "multiple_of")
    rows = int(real(more, "ffn_dim_multiplier", said.where) * int(2 * (4 * dim) / 3))
    if rows > LARGEST:
        raise DamagedCheckpoint(f"ffn_dim_multiplier is {shown(more)}", where=said.where)
    return int(unit * (-(-rows // unit)))


def _factor(said: ParamsJson, config: dict[str, Any]) -> float:
    known = (said.known.rope_scaling or {}).get("factor") if said.known else None
    if known is None and (config["hidden_size"], config["num_hidden_layers"]) in _LLAMA_3_2:
        what = "use_scaled_rope without a factor, which is 8 in Meta's code and 32 in Llama 3.2 1B and 3B as published"
        raise DamagedCheckpoint(what, where=said.where, do=WITH_REFERENCE)
    return 8.0 if known is None else float(known)
