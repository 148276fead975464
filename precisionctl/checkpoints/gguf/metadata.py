"""What the metadata of a GGUF file say under the keys of its architecture, each of its kind. Numbers of FP32 become the
shortest decimals that mean them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.head import GgufTensor
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import LARGEST, MOST_LAYERS
from precisionctl.sizes import listed

NEEDED: Any = object()
"""Default of a key that must be there."""

TOKEN_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}
"""The keys under `tokenizer.ggml.` of the ids of tokens that tokenizer_config.json has as `<word>_token`."""

_SAYS_NOTHING = {"rope.scaling.finetuned", "tensor_data_layout"}
"""Keys that change nothing; of Granite the first does."""


@dataclass(frozen=True)
class Described:
    """The metadata of a file, of one `architecture`, and its tensors. Raises DamagedCheckpoint for a key that is not
    there or is not of its kind."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    architecture: str
    where: object
    _asked: set[str] = field(default_factory=set)

    def said(self, key: str) -> Any:
        """A value under a key of the architecture; None if there is none."""
        self._asked.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, absent: Any = NEEDED, *, least: int = 0, most: int = LARGEST) -> Any:
        """An integer; `absent` where it is not there."""
        value = self._one(key, absent)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self._damaged(key, value)
        return value

    def number(self, key: str, absent: Any = NEEDED) -> Any:
        """An FP32; `absent` where it is not there."""
        value = self._one(key, absent)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self._damaged(key, value)
        return None if value is None else shortest(value)

    def expect(self, key: str, value: object) -> None:
        """Raise UnknownArchitecture if a key says something else."""
        if self.said(key) not in (None, value):
            what = f"{self.architecture}.{key} is {shown(self.said(key))}, and {value} in a model like this"
            raise UnknownArchitecture(what, where=self.where)

    def decoder_layers(self) -> int:
        """Number of layers without those of multi-token prediction."""
        prediction: int = self.count("nextn_predict_layers", 0)
        return int(self.count("block_count", most=MOST_LAYERS)) - prediction

    def flags(self, key: str) -> list[bool] | None:
        """A list of one for each layer."""
        values = self.said(key)
        if values is not None and (not isinstance(values, list) or not all(type(value) is bool for value in values)):
            raise self._damaged(key, values)
        return values

    def counts(self, key: str) -> list[int]:
        """An integer for each layer; a file may have one for all."""
        layers, values = self.count("block_count", most=MOST_LAYERS), self.said(key)
        if type(values) is int:
            values = [values] * layers
        if not isinstance(values, list) or len(values) != layers or not layers:
            raise self._damaged(key, values)
        if not all(type(value) is int and 0 <= value <= LARGEST for value in values):
            raise self._damaged(key, values)
        return values

    def has(self, name: str) -> bool:
        """Whether there is a tensor with this name."""
        return name in self.tensors

    def check_all_asked(self) -> None:
        """Raise UnknownArchitecture for a key of the architecture that nobody asked for: it may say another model."""
        prefix = f"{self.architecture}."
        keys = {key.removeprefix(prefix) for key in self.metadata if key.startswith(prefix)}
        if unread := sorted(keys - self._asked - _SAYS_NOTHING):
            what = f"settings of llama.cpp's {self.architecture} that are not read: {listed(unread)}"
            raise UnknownArchitecture(what, where=self.where, do="Start from the release.")

    def rows(self, name: str) -> int:
        if name not in self.tensors:
            raise DamagedCheckpoint(f"no `{name}`", where=self.where, do="Is it a whole model, and not a part of one?")
        return self.tensors[name].shape[0]

    def _one(self, key: str, absent: Any) -> Any:
        """A value, which some files have for each layer: the same for all."""
        value = self.said(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None:
            if absent is NEEDED:
                raise DamagedCheckpoint(f"no `{self.architecture}.{key}`", where=self.where, do="Copy it again.")
            return absent
        return value

    def _damaged(self, key: str, value: object) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.architecture}.{key} is {shown(value)}", where=self.where)


def shortest(value: float) -> float:
    """The shortest decimal that is the same FP32; integers stay."""
    return value if isinstance(value, int) else float(str(np.float32(value)))
