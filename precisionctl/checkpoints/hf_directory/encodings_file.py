"""How a checkpoint's weights are encoded, or once were.

`precisionctl/encodings.safetensors` in a checkpoint of decoded values holds the scale tensors of the directory of codes
that they come from, with their names, shapes and dtypes. Its metadata has the `quantization_config` of that directory,
and dtype, shape and block size of each weight. With it, values can be encoded to the same codes again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Chunked, read_tensor
from precisionctl.checkpoints.hf_directory.safetensors_file import (
    DTYPES,
    NAMES,
    StoredTensors,
    make_header,
    read_described,
)
from precisionctl.checkpoints.output import sync
from precisionctl.codes.elements import E4M3, FP8, Packing
from precisionctl.codes.encoding import Encoding, grid_shape
from precisionctl.errors import DamagedCheckpoint, UnknownFormat
from precisionctl.model.text_config import config_parts
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.coded_weights import (
    KEYS_OF_CODES,
    check_other_tensors,
    complete_encoding,
    input_largest,
    recognise,
)
from precisionctl.quant_methods.compressed_tensors import OLDER_KEY
from precisionctl.quant_methods.scales import Scales
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_files import has_file
from precisionctl.untrusted.safe_json import parse_json

if TYPE_CHECKING:
    from torch import Tensor

QUANT_CONFIG = "hf_quant_config.json"
"""Written by ModelOpt beside config.json; older versions wrote it in place of config.json's `quantization_config`."""

RELATIVE = Path("precisionctl/encodings.safetensors")
FORMAT_VERSION = 1
_KEY = "precisionctl"


def said_quantization(config: Mapping[str, Any]) -> Any:
    """What a config.json says of how weights are coded; None where it says nothing. It stands at the top, or where a
    wrapper's file has its text model, or, as compressed-tensors wrote it in 2024, under another name (in vLLM's order:
    0.33, weight_utils.py get_quant_config). MLX's `quantization` is read with its codes (`checkpoints/decoded/`)."""
    said = (part.get("quantization_config") for part in config_parts(config))
    return next(filter(None, said), None) or config.get(OLDER_KEY)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what it says of how weights are coded, wherever that stands."""
    parts = config_parts(config)

    def rest(part: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in part.items() if key not in KEYS_OF_CODES}
        return {key: rest(value) if any(value is each for each in parts) else value for key, value in kept.items()}

    return rest(config)


class EncodingsOnDemand(Mapping[str, Encoding]):
    """The encodings of weights by name, read from files on access. With a scale for each channel all grids of a large
    model would take gigabytes, so only the last one is cached: decoding a weight piece by piece uses the same one many
    times in a row."""

    def __init__(self, weights: Collection[str], read: Callable[[str], Encoding]) -> None:
        self._weights, self._read = weights, read
        self._last: tuple[str, Encoding] | None = None

    def __getitem__(self, name: str) -> Encoding:
        if name not in self._weights:
            raise KeyError(name)
        if self._last is None or self._last[0] != name:
            self._last = name, self._read(name)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights


def stored_encodings(
    stored: Chunked, weights: Mapping[str, TensorSpec], scales: Mapping[str, Scales], where: object
) -> EncodingsOnDemand:
    """The encodings of `weights`, whose `scales` are read from the tensors in `stored` on access. `where` is the
    checkpoint, for errors."""

    def read(name: str) -> Encoding:
        return complete_encoding(partial(read_tensor, stored), scales[name], weights[name], where)

    return EncodingsOnDemand(scales, read)


@dataclass(frozen=True)
class WeightEncodings:
    """How the weights of a model are encoded, or were before they were decoded; by Hugging Face name.

    `weights` are shape and dtype of the codes, and `scales` the names of their scale tensors, which are in `stored`
    (perhaps with others, of a KV cache). `quantization` is the `quantization_config` of the directory that the codes
    come from, and `files` other files that describe them (`hf_quant_config.json`); both are empty for codes that do not
    come from a Hugging Face directory. `of_weights` is the digest of the decoded values (conversion/weights_digest.py).
    It is taken if `stored` has scales of inputs or of a cache, which were calibrated with exactly these values.
    """

    weights: Mapping[str, TensorSpec]
    scales: Mapping[str, Scales]
    stored: Chunked
    quantization: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    path: Path | None = None
    of_weights: str | None = None

    @property
    def has_fixed_scales(self) -> bool:
        """Whether some stored scale is of an input, or of a KV cache: of what no weight decides."""
        return len(self.stored.specs) > sum(len(scales.of_weight) for scales in self.scales.values())

    @property
    def by_name(self) -> Mapping[str, Encoding]:
        """The encoding of each weight, read on access."""
        return stored_encodings(self.stored, self.weights, self.scales, self.path)

    def merges(self, name: str) -> bool:
        """Whether several codes of a weight may be one value in BF16, from which only one of them comes back: up to 255
        steps from a zero point, two neighbours may be the same number in its 8 bits."""
        return self.scales[name].zero_points is not None and self.weights[name].element.bits == 8

    def input_amax(self, name: str) -> Tensor | None:
        """The amax, FP32 `[]`, from which the fixed input scale of a weight was made; None without such a scale. Raises
        DamagedCheckpoint for a scale that is negative or NaN, or whose amax exceeds FP32."""
        fixed = self._fixed_scale_of_input(name)
        return fixed and fixed[1]

    def input_scale(self, name: str) -> float | None:
        """The same as FP8 codes have it, as scale_inv."""
        fixed = self._fixed_scale_of_input(name)
        if fixed is None:
            return None
        stored, amax = fixed
        return float(stored if self.scales[name].inputs_in_fp8 else amax / E4M3.largest)

    def stored_input_scale(self, name: str) -> Tensor | None:
        """The same as it is stored, FP32 `[]`: a global one as the method has it."""
        fixed = self._fixed_scale_of_input(name)
        return fixed and fixed[0]

    def input_zero_point(self, name: str) -> float | None:
        """The zero point beside the fixed input scale of a weight; None where there is none."""
        stored = self.scales[name].input_zero_point
        return None if stored is None else float(read_tensor(self.stored, stored).reshape(()))

    def _fixed_scale_of_input(self, name: str) -> tuple[Tensor, Tensor] | None:
        """As stored, and the amax that it was made from; both FP32 `[]`."""
        scales = self.scales[name]
        if scales.input is None:
            return None
        stored = read_tensor(self.stored, scales.input).float().reshape(())
        amax = scales.input_amax(stored, self.input_zero_point(name) or 0.0)
        if not (bool(amax.isfinite() & stored.isfinite()) and stored >= 0):
            raise DamagedCheckpoint(f"{scales.input} holds a scale that is negative, infinite or NaN", where=self.path)
        return stored, amax


def write(directory: Path, encodings: WeightEncodings) -> None:
    """Write and sync the file in a checkpoint's directory. Equal encodings give equal bytes. One tensor is in memory at
    a time."""
    path = directory / RELATIVE
    path.parent.mkdir(parents=True, exist_ok=True)
    weights: dict[str, dict[str, Any]] = {}
    for name, weight in encodings.weights.items():
        scales = encodings.scales[name]
        weights[name] = {
            "codes": NAMES[weight.dtype],
            "shape": weight.shape,
            "block": scales.block,
            "scale_inv": scales.weight,
            "input_scale_inv": scales.input,
        }
        if packing := weight.packing:
            weights[name]["packed"] = _description(packing)
            weights[name]["global_scale"] = [scales.global_scale, scales.divides]
            weights[name] |= {"zero_points": scales.zero_points, "weight_shape": scales.shape}
            if scales.input_zero_point is not None:
                weights[name]["input_zero_point"] = scales.input_zero_point
    metadata = {
        "format_version": FORMAT_VERSION,
        "quantization_config": encodings.quantization,
        "files": {name: data.decode() for name, data in encodings.files.items()},
        "weights": weights,
    }
    if encodings.of_weights is not None:
        metadata["of_weights"] = encodings.of_weights
    specs = dict(sorted(encodings.stored.specs.items()))
    header, offsets = make_header(specs, {_KEY: json.dumps(metadata, sort_keys=True)})
    with open(path, "wb") as file:
        file.write(header)
        for name in specs:
            file.seek(offsets[name])
            file.write(read_tensor(encodings.stored, name).reshape(-1).view(torch.uint8).numpy().tobytes())
    sync(path)


def find(checkpoint: Path) -> WeightEncodings | None:
    """Read the file in a checkpoint's directory; None if there is none.

    Raises UnknownFormat for a version of another release, DamagedCheckpoint for a file that contradicts itself.
    """
    path = checkpoint / RELATIVE
    if not has_file(path, checkpoint):
        return None
    tensors, metadata = read_described(path)
    stored = StoredTensors({name: (path, tensor) for name, tensor in tensors.items()})
    fields = parse_json(metadata.get(_KEY, "").encode(), path)
    if fields.get("format_version") != FORMAT_VERSION:
        raise UnknownFormat(
            "encodings of another format version", where=path, do="Read them with the release that wrote them."
        )
    try:
        quantization = dict(fields["quantization_config"])
        # the packings that weights of a directory with this `quantization_config` may have, by their description
        packings: dict[tuple[Any, ...], Packing] = {}
        if any("packed" in entry for entry in fields["weights"].values()):
            method = recognise({"quantization_config": quantization})
            formats = method.read(quantization).formats if method else ()
            packings = {tuple(_description(form.packing)): form.packing for form in formats if form.packing}
        weights, scales = dict[str, TensorSpec](), dict[str, Scales]()
        for name, entry in fields["weights"].items():
            shape, dtype = entry["shape"], DTYPES[entry["codes"]]
            packing = packings[tuple(entry["packed"])] if "packed" in entry else None
            coded = dtype == packing.element.dtype if packing else dtype in FP8
            if not coded or not all(type(size) is int and 0 < size < 1 << 40 for size in shape):
                raise ValueError("a weight of no codes, or of no size")
            weights[name] = TensorSpec(tuple(shape), dtype, packing=packing)
            scales[name] = _scales(name, entry, weights[name], stored.specs, path)
        files = {name: text.encode() for name, text in fields["files"].items() if name == QUANT_CONFIG}
        of_weights = fields.get("of_weights")
        if not isinstance(of_weights, str | None):
            raise ValueError("of_weights is no digest")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"the encodings make no sense: {error!r:.100}", where=path) from error
    return WeightEncodings(weights, scales, stored, quantization, files, path, of_weights)


def _description(packing: Packing) -> list[str | int | None]:
    return [packing.name, packing.element.name, NAMES[packing.word], packing.suffix, packing.block]


def _scales(
    name: str, fields: Mapping[str, Any], weight: TensorSpec, stored: Mapping[str, TensorSpec], where: Path
) -> Scales:
    high, wide = fields["block"]
    if not all(type(size) is int and 0 < size < 1 << 40 for size in (high, wide)):
        raise ValueError(f"{name} has a block of no size")
    of_all, divides = fields.get("global_scale", (None, False))
    found = Scales(
        fields["scale_inv"],
        fields["input_scale_inv"],
        (high, wide),
        global_scale=of_all,
        divides=bool(divides),
        zero_points=fields.get("zero_points"),
        shape=fields.get("weight_shape"),
        input_zero_point=fields.get("input_zero_point"),
        input_largest=input_largest(weight),
    )
    if missing := [each for each in found.names if each not in stored]:
        raise ValueError(f"{name} has no {missing[0]}")
    spec, counts = stored[found.weight], grid_shape(weight.rows, weight.columns, found.block)
    if spec.rows * spec.columns != counts[0] * counts[1]:
        raise ValueError(f"{name} has as many scales as {spec.shape}")
    if weight.packing and weight.columns % found.block[1]:
        raise ValueError(f"{name} has no whole groups")
    check_other_tensors(found, weight, stored, where)
    if found.zero_points is not None and not weight.element.is_integer:
        raise ValueError(f"{name} has zero points")
    if found.input_zero_point is not None and found.input is None:
        raise ValueError(f"{name} has a zero point of inputs without a scale")
    if found.input is not None and stored[found.input].rows * stored[found.input].columns != 1:
        raise ValueError(f"{name} has several input scales")
    return found
