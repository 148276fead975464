"""Read a Llama that nanotron trained, such as SmolLM, under Hugging Face's names. Its model_config.json has the keys of
Hugging Face's Llama, and config.json is made of it.

Trap: with `rope_interleaved`, and before there was such a key, the two numbers of a rotary pair are in neighbouring
rows of queries and keys; in Hugging Face they are in the two halves of a head (examples/llama/convert_nanotron_to_hf.py
at 2411b022).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import NO_HINTS, Companions, Container, Hints, without_iterations
from precisionctl.checkpoints.chunks import Chunk, ComputedTensor, SomeRows
from precisionctl.checkpoints.hf_directory.companions import to_json
from precisionctl.checkpoints.nanotron.nanotron_files import CONFIG, is_step, read_parts
from precisionctl.checkpoints.other_trainers.name_patterns import pattern_of, with_numbers
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory, both_are
from precisionctl.checkpoints.rotary_heads import Heads
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensors, check_whole, slices
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownArchitecture
from precisionctl.param import TensorSpec
from precisionctl.paths import own_name
from precisionctl.untrusted.safe_files import read_json

_IN_CONFIG = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act"),
    *("attention_bias", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that nanotron's config has of Hugging Face's (`get_config_mapping`)."""

_HF = "model.layers.#."
_BLOCK = "model.decoder.#.pp_block."
_NAMES: Mapping[str, str] = {
    "model.token_position_embeddings.pp_block.token_embedding": "model.embed_tokens",
    "model.final_layer_norm.pp_block": "model.norm",
    "model.lm_head.pp_block": "lm_head",
    f"{_BLOCK}attn.o_proj": f"{_HF}self_attn.o_proj",
    f"{_BLOCK}mlp.down_proj": f"{_HF}mlp.down_proj",
    f"{_BLOCK}input_layernorm": f"{_HF}input_layernorm",
    f"{_BLOCK}post_attention_layernorm": f"{_HF}post_attention_layernorm",
}
_QKV, _GATE_UP = f"{_BLOCK}attn.qkv_proj", f"{_BLOCK}mlp.gate_up_proj"


class NanotronReader(TrainerDirectory):
    """A step of nanotron as a Reader. Opening it reads headers alone.

    Raises DamagedCheckpoint for files that contradict one another, and UnknownArchitecture for another model than a
    Llama.
    """

    container = "nanotron"

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        super().__init__(path, hints, "a checkpoint of nanotron")
        where = path / CONFIG
        self._config = read_json(where, path)
        if self._config.get("is_llama_config") is not True:
            what = "a model of nanotron that is no Llama, whose names are not known here"
            raise UnknownArchitecture(what, where=where, do="Convert it with nanotron's own examples.")
        tensors = {name: one for name, part in read_parts(path).items() for _, one in slices(name, part, 0, path)}
        for name, tensor in tensors.items():
            check_whole(name, tensor, path)
            if tensor.spec.is_codes:
                what = f"`{name}` is {tensor.spec.dtype}: FP8 codes, whose scales are not read"
                raise CheckpointError(what, where=path, do="Save the weights in BF16.")
        self._stored = LogicalTensors(tensors)
        self._places: dict[str, str | ComputedTensor] = {}
        sources = dict[str, str]()
        for name in tensors:
            made = self._by_hf_names(name)
            for new in made:
                if (first := sources.setdefault(new, name)) != name:
                    raise both_are(first, name, new, path)
            self._places |= made
        self.specs: Mapping[str, TensorSpec] = {
            name: self._stored.spec_at(place) for name, place in self._places.items()
        }

    @cached_property
    def own_companions(self) -> Companions:
        found = super().own_companions
        if "config.json" in found.files:
            return found
        made: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        made |= {key: self._config[key] for key in _IN_CONFIG if key in self._config}
        return replace(found, files={**found.files, "config.json": to_json(made)})

    @property
    def iteration(self) -> int | None:
        """The step, by which nanotron names the directory."""
        name = own_name(self.path)
        return int(name) if name.isdecimal() and len(name) < 19 else None

    @property
    def files(self) -> Sequence[Path]:
        return sorted(self._stored.files)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._stored.chunks_at(self._places[name])

    def notes(self) -> Iterator[str]:
        if not (self.path / "config.json").is_file():
            yield f"config.json is made of {CONFIG}."
        if (self.path / "optimizer").is_dir():
            yield "Not carried over from the run: the optimizer, random generators."

    def _by_hf_names(self, name: str) -> dict[str, str | ComputedTensor]:
        """The tensors of Hugging Face's that a stored one is, or has the rows of."""
        module, _, kind = name.rpartition(".")
        pattern, numbers = pattern_of(module)
        made: dict[str, str | ComputedTensor]
        if pattern == _QKV:
            made = {f"{_HF}self_attn.{part}_proj": place for part, place in self._attention(name).items()}
        elif pattern == _GATE_UP:
            half = self._stored.specs[name].rows // 2
            made = {
                f"{_HF}mlp.{part}_proj": SomeRows(self._stored, name, at * half, half)
                for at, part in enumerate(("gate", "up"))
            }
        elif pattern in _NAMES:
            made = {_NAMES[pattern]: name}
        else:
            return {name: name}
        return {f"{with_numbers(hf, numbers)}.{kind}": place for hf, place in made.items()}

    def _attention(self, name: str) -> dict[str, ComputedTensor]:
        model, rows = self.model, self._stored.specs[name].rows
        size, heads = model.kv_channels, (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        if rows != sum(heads) * size or size % 2:
            what = f"`{name}` has {rows} rows, and by {CONFIG} {sum(heads)} heads of {size}"
            raise DamagedCheckpoint(what, where=self.path, do="Is it this checkpoint's?")
        pairs = self._config.get("rope_interleaved", True) is not False
        found, first = dict[str, ComputedTensor](), 0
        for part, count in zip("qkv", heads, strict=True):
            if pairs and part != "v":
                starts = range(first, first + count * size, size)
                found[part] = Heads(self._stored, name, starts, size, pairs=True)
            else:
                found[part] = SomeRows(self._stored, name, first, count * size)
            first += count * size
        return found


CONTAINER = Container(is_step, without_iterations(NanotronReader), f"{CONFIG} beside model/model of nanotron")
