"""What the metadata of a GGUF file say under the keys of its architecture, each of its kind. Numbers of FP32 become the
shortest decimals that mean them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from precisionctl.architectures.config_keys import NEEDED
from precisionctl.checkpoints.gguf.head import GgufTensor
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import LARGEST, MOST_LAYERS
from precisionctl.sizes import listed

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

    def said(self, key: str) -> Any:
        """A value under a key of the architecture; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, absent: Any = NEEDED, *, least: int = 0, most: int = LARGEST) -> Any:
        """An integer; `absent` where it is not there."""
        value = self._one(key, absent)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self._damaged(key, value)
        return value

    def share(self, key: str, among: str) -> int:
        """How much of an integer under one key each of as many as another key says has."""
        size, number = self.count(key), self.count(among, least=1)
        if size % number:
            raise self._damaged(key, size)
        return int(size // number)

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
            raise UnknownArchitecture(what)

    def layers(self) -> int:
        """Number of layers, with those of multi-token prediction, which come last."""
        return int(self.count("block_count", most=MOST_LAYERS))

    def prediction_layers(self) -> int:
        return int(self.count("nextn_predict_layers", 0, most=self.layers()))

    def decoder_layers(self) -> int:
        """Number of layers without those of multi-token prediction."""
        return self.layers() - self.prediction_layers()

    def flags(self, key: str) -> list[bool] | None:
        """One for each decoder layer; a file may list those of multi-token prediction too."""
        values = self._of_decoder(key)
        if values is not None and not all(type(value) is bool for value in values):
            raise self._damaged(key, values)
        return values

    def numbers(self, key: str) -> list[float] | None:
        """The same of FP32."""
        values = self._of_decoder(key)
        if values is None:
            return None
        if not all(type(value) is float and math.isfinite(value) for value in values):
            raise self._damaged(key, values)
        return [shortest(value) for value in values]

    def counts(self, key: str, *, least: int = 0) -> list[int]:
        """An integer for each layer; a file may have one for all."""
        layers, values = self.layers(), self.said(key)
        if type(values) is int:
            values = [values] * layers
        if not isinstance(values, list) or len(values) != layers or not layers:
            raise self._damaged(key, values)
        if not all(type(value) is int and least <= value <= LARGEST for value in values):
            raise self._damaged(key, values)
        return values

    def has(self, name: str) -> bool:
        """Whether there is a tensor with this name."""
        return name in self.tensors

    def check_read(self, keys: Iterable[str]) -> None:
        """Raise UnknownArchitecture for a key of the architecture that is none of these: it may say another model."""
        prefix = f"{self.architecture}."
        said = {key.removeprefix(prefix) for key in self.metadata if key.startswith(prefix)}
        self.refuse(said - {*keys} - _SAYS_NOTHING)

    def refuse(self, keys: Iterable[str]) -> None:
        """Raise UnknownArchitecture for those of the keys that are there."""
        if unread := sorted(key for key in keys if self.said(key) is not None):
            what = f"settings of llama.cpp's {self.architecture} that are not read: {listed(unread)}"
            raise UnknownArchitecture(what, do="Start from the release.")

    def rows(self, name: str) -> int:
        if name not in self.tensors:
            raise DamagedCheckpoint(f"no `{name}`", do="Is it a whole model, and not a part of one?")
        return self.tensors[name].shape[0]

    def _of_decoder(self, key: str) -> list[Any] | None:
        values, layers = self.said(key), self.decoder_layers()
        if values is not None and (not isinstance(values, list) or len(values) not in (layers, self.layers())):
            raise self._damaged(key, values)
        return None if values is None else values[:layers]

    def _one(self, key: str, absent: Any) -> Any:
        """A value, which some files have for each layer: the same for all."""
        value = self.said(key)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None:
            if absent is NEEDED:
                raise DamagedCheckpoint(f"no `{self.architecture}.{key}`", do="Copy it again.")
            return absent
        return value

    def _damaged(self, key: str, value: object) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.architecture}.{key} is {shown(value)}")


def shortest(value: float) -> float:
    """The shortest decimal that is the same FP32; integers stay."""
    return value if isinstance(value, int) else float(str(np.float32(value)))
