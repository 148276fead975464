"""A wrapper's tower as llama.cpp has it in a second file, `mmproj`: names, what becomes of values, and metadata.

llama.cpp has one graph for each kind of projector, which takes some settings from the file and others for granted. A
tower with other settings, or with other tensors, gets no file: UnknownArchitecture says why.

Sources: llama.cpp's tools/mtmd (clip.cpp, models/*.cpp), conversion/*.py (MmprojModel) and
gguf-py/gguf/tensor_mapping.py, of llama-cpp-python 0.3.36; transformers 5.24 for what a tower computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.checkpoints.hf_directory.config_json import is_token
from precisionctl.checkpoints.tensor_changes import SAME, Shape, TensorChange
from precisionctl.dtypes import DType
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_json import parse_json

_MOST = 1 << 20
"""No number of a tower is larger."""
_SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""Kinds of rotary embeddings whose angles are not those of the base (transformers' modeling_rope_utils.py)."""
_MOST_LAYERS, _OF_LAYERS = 1 << 12, ("depth", "num_hidden_layers")


@dataclass(frozen=True)
class TowerRow:
    """The tensors that llama.cpp has for one of a tower of this `shape`, what becomes of its values, and the `dtype`
    that it has whatever others have."""

    gguf: tuple[str, ...]
    shape: Shape
    change: TensorChange = SAME
    dtype: DType | None = None


@dataclass(frozen=True)
class Tower:
    """A tower in `mmproj`.

    `rows` go by the names of published files, with `{layer}` for the numbers of its `layers`, or of so many as
    `layers_of` says of the beginning of their names; `spellings` are beginnings of other names, each with what those
    have in its place. `metadata` are the keys behind
    `general.file_type`. `unread` are beginnings of names of tensors that neither llama.cpp nor transformers computes
    the text model's input with. `token` is one of the text model whose embedding is a tensor of the file too, behind
    the tensor's name. `otherwise` is what llama.cpp computes otherwise of all such towers, in whatever file.
    """

    layers: int
    rows: Mapping[str, TowerRow]
    metadata: Mapping[str, GgufValue]
    spellings: Mapping[str, str] = field(default_factory=lambda: {"model.": ""})
    unread: tuple[str, ...] = ()
    token: tuple[str, int] | None = None
    otherwise: str = ""
    layers_of: Mapping[str, int] = field(default_factory=dict)

    def tensors(self, specs: Mapping[str, TensorSpec]) -> dict[str, tuple[TowerRow, tuple[str, ...]]]:
        """The row of each of these Hugging Face tensors, and its names in GGUF, without those that are `unread`.

        Raises UnknownArchitecture where they are not all those of the tower, in the shapes that config.json says."""
        found = dict[str, tuple[TowerRow, tuple[str, ...]]]()
        here = set[tuple[str, int]]()
        for name, spec in specs.items():
            published = self.published(name)
            if published.startswith(self.unread):
                continue
            # The name of a row, and the number of the layer, 0 where it is in none
            match = None if published in self.rows else _LAYER.search(published)
            template, layer = (_LAYER.sub("{layer}", published, 1), int(match[1])) if match else (published, 0)
            row = self.rows.get(template)
            if row is None or not layer < self._layers(template):
                raise no_tower(f"llama.cpp has no tensor for `{name}`")
            if spec.shape != row.shape:
                raise no_tower(f"`{name}` is {list(spec.shape)}, and {list(row.shape)} by config.json")
            here.add((template, layer))
            found[name] = row, tuple(each.replace("{layer}", str(layer)) for each in row.gguf)
        for template in self.rows:
            for layer in range(self._layers(template)):
                if (template, layer) not in here:
                    raise no_tower(f"its tower has no `{template.replace('{layer}', str(layer))}`")
        return found

    def _layers(self, template: str) -> int:
        """The number of layers that have a row."""
        if "{layer}" not in template:
            return 1
        return next((count for begin, count in self.layers_of.items() if template.startswith(begin)), self.layers)

    def published(self, name: str) -> str:
        """What published files call a tensor."""
        for other, before in self.spellings.items():
            if name.startswith(other):
                name = before + name.removeprefix(other)
        return name


_LAYER = re.compile(r"(?<=\.)(0|[1-9]\d{0,5})(?=\.)")


def no_tower(what: str) -> UnknownArchitecture:
    """The error about a tower of which llama.cpp would compute something else."""
    return UnknownArchitecture(what, do="Serve it with an engine that computes it: see --target.")


class TowerSizes(NamedTuple):
    """Of a tower of images; `image` and `patch` are the sides of their squares, in pixels."""

    width: int
    mlp: int
    layers: int
    heads: int
    image: int
    patch: int


@dataclass(frozen=True)
class TowerSettings:
    """What is said of a wrapper's tower: its text `model`, the whole `config`.json, the part of the `tower` with its
    class's defaults, what becomes of images before it (`processor`), and the bytes of tokenizer.json."""

    model: ModelShape
    config: Mapping[str, Any]
    tower: Mapping[str, Any]
    processor: Mapping[str, Any]
    tokenizer: bytes | None

    def size(self, key: str) -> int:
        """A number of the tower's, above 0. Raises UnknownArchitecture for anything else."""
        value = self.tower.get(key)
        value = value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value
        if type(value) is not int or not 0 < value <= (_MOST_LAYERS if key in _OF_LAYERS else _MOST):
            raise no_tower(f"its config.json has {shown(value)} as `{key}` of the tower, where a size is expected")
        return value

    def check(self, of: Mapping[str, Any] | None = None, **computed: Any) -> None:
        """Raise UnknownArchitecture for a setting of the tower (or `of` another part) that is not as `computed`."""
        for key, value in computed.items():
            found = (self.tower if of is None else of).get(key)
            if found != value:
                raise no_tower(f"llama.cpp computes its tower with {key} {shown(value)}, not with {shown(found)}")

    def sizes(self) -> TowerSizes:
        """Those of a tower whose keys have the usual names."""
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return TowerSizes(*(self.size(key) for key in (*keys, "image_size", "patch_size")))

    def check_rotary(self, heads: int, width: int, base: int = 10000) -> None:
        """Raise UnknownArchitecture for rotary embeddings of another base, or scaled ones, wherever config.json says
        it, and for heads whose halves are not halves that turn by row and by column."""
        if width % (4 * heads):
            raise no_tower(f"{heads} heads of a tower of {width} cannot be turned in four parts")
        parts = [self.tower]
        for key in ("rope_parameters", "rope_scaling"):
            said = self.tower.get(key) or {}
            if not isinstance(said, Mapping):
                raise no_tower(f"its config.json has {shown(said)} as `{key}`")
            kind = said.get("rope_type", said.get("type", "default"))
            if kind in _SCALED:
                what = f"llama.cpp scales no rotary embeddings of its tower, and config.json says {shown(kind)}"
                raise no_tower(what)
            parts.append(said)
        for said in parts:
            if (found := said.get("rope_theta")) not in (None, base):
                raise no_tower(f"llama.cpp turns heads of its tower with a base of {base}, not of {shown(found)}")

    def token(self, text: str) -> int | None:
        """The id of a special token."""
        said = parse_json(self.tokenizer, "tokenizer.json").get("added_tokens") if self.tokenizer else None
        added = [each for each in (said if isinstance(said, list) else []) if isinstance(each, Mapping)]
        found = next((each.get("id") for each in added if each.get("content") == text), None)
        return found if is_token(found, self.model) else None

    def epsilon(self, value: Any) -> np.float32:
        if not isinstance(value, float) or not 0 < value < 1:
            raise no_tower(f"its config.json has {shown(value)} as the epsilon of norms")
        return np.float32(value)

    def common(self, sizes: TowerSizes) -> dict[str, GgufValue]:
        """The keys that every tower of images has."""
        self.check({"do_rescale": True} | {**self.processor}, do_rescale=True)
        if self.processor.get("do_normalize") is False:  # by the file's mean and deviation llama.cpp always does
            self.check(self.processor, image_mean=[0, 0, 0], image_std=[1, 1, 1])
        said = {
            "projection_dim": self.model.hidden_size,
            "image_size": sizes.image,
            "patch_size": sizes.patch,
            "embedding_length": sizes.width,
            "feed_forward_length": sizes.mlp,
            "block_count": sizes.layers,
            "attention.head_count": sizes.heads,
        }
        return {
            "clip.has_vision_encoder": True,
            **{f"clip.vision.{key}": np.uint32(size) for key, size in said.items()},
            "clip.vision.image_mean": self._three("image_mean"),
            "clip.vision.image_std": self._three("image_std"),
        }

    def _three(self, key: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        values = self.processor.get(key)
        numbers = values if isinstance(values, list) and len(values) == 3 else []
        if not numbers or not all(isinstance(each, int | float) and abs(each) < _MOST for each in numbers):
            what = f"no preprocessor_config.json or processor_config.json has three numbers as `{key}`"
            raise no_tower(f"{what}, with which llama.cpp prepares images")
        return np.array(numbers, np.float32)


class TowerKind(NamedTuple):
    """What makes the tower of a kind of wrapper, and what the classes of transformers have for keys that its
    `vision_config` lacks."""

    made_by: Callable[[TowerSettings], Tower]
    defaults: Mapping[str, Any]


def linear(hf: str, gguf: str, rows: int, columns: int, **settings: Any) -> dict[str, TowerRow]:
    """The rows of a linear with a bias."""
    return {
        f"{hf}.weight": TowerRow((f"{gguf}.weight",), (rows, columns), **settings),
        f"{hf}.bias": TowerRow((f"{gguf}.bias",), (rows,), **settings),
    }


def norm(hf: str, gguf: str, size: int, ends: Iterable[str] = ("weight", "bias")) -> dict[str, TowerRow]:
    """The rows of a norm."""
    return {f"{hf}.{end}": TowerRow((f"{gguf}.{end}",), (size,)) for end in ends}
