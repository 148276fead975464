"""config.json made of Meta's params.json: Llama 1, 2, Code Llama, and 3 to 3.2 (text).

Sources: meta-llama/llama, llama/model.py; meta-llama/llama-models, models/llama3/args.py, model.py and tokenizer.py;
transformers 4, models/llama/convert_llama_weights_to_hf.py.

Traps: the size of the MLP follows from a formula; a vocabulary of -1 is the tokenizer's; scaled rotary embeddings have
no factor in the file: it is 8 in Meta's code and Llama 3.1, and 32 where Meta publishes Llama 3.2 1B and 3B.
"""

from collections.abc import Callable
from typing import Any

from precisionctl.architectures.config_keys import is_on, size
from precisionctl.architectures.rope import LLAMA3
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.consolidated.meta_shards import EMBEDDING
from precisionctl.checkpoints.consolidated.params import MadeConfig, ParamsJson, in_its_words
from precisionctl.checkpoints.hf_directory.safetensors_file import Places
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_parts import LARGEST, real

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}
_WORDS = {theirs: own for own, theirs in _SIZES.items()} | {"num_key_value_heads": "n_kv_heads"}
_LLAMA_3_2 = (2048, 16), (3072, 28)
"""Sizes and layers of those with another factor."""

_OF_BASE = {500000.0: ("Llama 3", 8192), 1000000.0: ("Code Llama", 16384)}
_SCALED, _OTHERS = ("Llama 3.1", 131072), ("Llama 2", 4096)
"""The longest text of a release, which its rotary embeddings tell."""

_VOCABULARY_OF_3, _BEGIN, _END = 128256, 128000, 128001


def llama_config(said: ParamsJson, read: Callable[[], Places]) -> MadeConfig:
    """The config.json of a model that a params.json describes. `read` finds its tensors, which say how large its
    vocabulary is, and whether it has an output layer; it is asked once the keys are known. Raises as
    `mistral_params.mistral_config`."""
    said.skip("max_batch_size", "max_seq_len")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {theirs: said.take(own) for own, theirs in _SIZES.items()}
    config["num_key_value_heads"] = said.take("n_kv_heads", config["num_attention_heads"])
    vocabulary = said.take("vocab_size", -1)
    with in_its_words(_WORDS):
        hidden_size = size(config, "hidden_size")
    config["intermediate_size"] = _intermediate_size(said, hidden_size)
    theta, notes = real(said.take("rope_theta", 10000.0), "rope_theta"), list[str]()
    scaled = is_on({"use_scaled_rope": said.take("use_scaled_rope", False)}, "use_scaled_rope")
    config["rope_theta"] = theta
    if scaled:
        factor = (said.known.rope_scaling or {}).get("factor") if said.known else None
        if factor is None and (hidden_size, config["num_hidden_layers"]) in _LLAMA_3_2:
            raise DamagedCheckpoint(
                "use_scaled_rope without a factor, which is 8 in Meta's code and 32 in Llama 3.2 1B and 3B as "
                "published",
                do=WITH_REFERENCE,
            )
        factor = 8.0 if factor is None else float(factor)
        config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    release, positions = _SCALED if scaled else _OF_BASE.get(theta, _OTHERS)
    config["max_position_embeddings"] = said.known.max_position_embeddings if said.known else positions
    notes.append(f"params.json does not say how long a text may be: {positions} is written, as of {release}.")
    said.check_read()

    tensors = read()
    if EMBEDDING not in tensors:
        raise DamagedCheckpoint(f"no `{EMBEDDING}`", do="Is every file there?")
    config["vocab_size"] = tensors[EMBEDDING][1].spec.rows if vocabulary == -1 else vocabulary
    # Llama 3.2 1B and 3B are tied, and have a copy: a reference says so
    config["tie_word_embeddings"] = said.known.tied_embeddings if said.known else "output.weight" not in tensors
    if config["vocab_size"] == _VOCABULARY_OF_3:
        config |= {"bos_token_id": _BEGIN, "eos_token_id": _END}
        notes.append(f"A text ends with token {_END}, as of a base model; a chat model's may end with 128009 too.")
    return MadeConfig(config, _WORDS, tuple(notes))


def _intermediate_size(said: ParamsJson, hidden_size: int) -> int:
    """Two thirds of four times the hidden size, times a number, rounded up (llama/model.py, FeedForward)."""
    unit = size({"multiple_of": said.take("multiple_of", 256)}, "multiple_of")
    more = said.take("ffn_dim_multiplier", 1)
    rows = int(real(more, "ffn_dim_multiplier") * int(2 * (4 * hidden_size) / 3))
    if rows > LARGEST:
        raise DamagedCheckpoint(f"ffn_dim_multiplier is {shown(more)}")
    return int(unit * (-(-rows // unit)))
