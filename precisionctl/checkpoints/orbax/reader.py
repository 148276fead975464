"""Read a model that MaxText saved with Orbax: weights, and AdamW's moments.

A state is `params.params.<parameter>`, optax's `opt_state` and `step` (`save_checkpoint` in MaxText's
common/checkpointing.py). States of NNX alone have the parameters at the top or in `base`, numbers of layers apart, and
each array in a `value`; its generators of random numbers are beside them (`extract_nnx_weights` in
checkpoint_conversion/utils/utils.py).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from precisionctl.architectures.families import from_hf_config
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.base import Container, Hints
from precisionctl.checkpoints.chunks import Chunk, Chunked, whole
from precisionctl.checkpoints.orbax.decoded_chunks import DecodedChunks
from precisionctl.checkpoints.orbax.hf_rows import HfRows, hf_rows
from precisionctl.checkpoints.orbax.step_directory import item_directory, item_in, read_tree, steps_in
from precisionctl.checkpoints.orbax.zarr_array import ZarrArray
from precisionctl.checkpoints.other_trainers.maxtext_families import FAMILIES, placed
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory, by_model_names, says_its_model
from precisionctl.checkpoints.other_trainers.trainer_run import NO_COUNT, TrainerRun, adam_run, number
from precisionctl.errors import (
    DROP_OPTIMIZER,
    CheckpointError,
    DamagedCheckpoint,
    UnknownArchitecture,
    UnmappedTensor,
    at,
    shown,
)
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import MOMENTS, STATE, TensorSpec, state_name, weights_and_states
from precisionctl.paths import above, own_name
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_json import parse_json

_MOMENT = re.compile(r"opt_state\.(?:inner_state\.)?0\.(mu|nu)\.(?:params\.)?(.+)")
"""optax's AdamW, perhaps inside MaxText's `skip_step_on_spikes`. Its `adam_pax` has `mu` and `nu` without a number, and
has already divided them by what AdamW divides them by in each update."""
_COUNT = re.compile(r"opt_state\.(?:inner_state\.)?(\d+)\.count")
"""Of AdamW, which is the first in optax's chain, and of its schedule."""
_KINDS = dict(zip(("mu", "nu"), MOMENTS, strict=True))
AUX = "nnx_aux."
"""What MaxText keeps beside parameters: generators of random numbers, and variables of its own."""
_SETTINGS = "AdamW's settings, which are in MaxText's configuration"
_SCALED = "that MaxText updates queries or embeddings as it has them, multiplied by another factor"
_PARAMETERS = re.compile(r"params\.(?:params\.)?|base\.")
_GENERATORS = re.compile(r"(?:.+\.)?(?:\w+_)?rngs(?:\..+)?")


class OrbaxReader(TrainerDirectory):
    """MaxText's state in a directory of Orbax. Opening it reads the index and the arrays' descriptions.

    Raises DamagedCheckpoint as `read_tree`, UnknownArchitecture for a family whose names in MaxText are not known, and
    UnmappedTensor for a parameter that none of its names is. `not_carried` are the arrays that are neither weights nor
    AdamW's moments, and `padding` the rows of a padded vocabulary that are left out.
    """

    container = "orbax"

    def __init__(self, path: Path, iteration: int | None, hints: Hints) -> None:
        item = item_directory(path, iteration)
        super().__init__(path, hints, "a checkpoint of Orbax", item, above(item), above(above(item)))
        self._arrays, files = read_tree(item)
        self.files: Sequence[Path] = sorted(files)
        self._item, self.not_carried = item, list[str]()
        self._decoded = DecodedChunks(self._arrays.values())
        with at(item):
            named = (
                (place.array.name, state_name(kind, name) if kind else name, place)
                for kind, arrays in self._by_kind().items()
                for name, place in self._placed(kind, arrays)
            )
            self._places: Mapping[str, HfRows] = by_model_names(named, item)
        specs = {name: TensorSpec(place.shape, place.array.dtype) for name, place in self._places.items()}
        self.optimizer_specs: Mapping[str, TensorSpec]
        weights, self.optimizer_specs = weights_and_states(specs)
        self._towers: Chunked | None = None
        if says_its_model(self) and self._sizes.wrapper is not None:
            if hints.towers is None:
                what = f"MaxText's state has the text model alone of a {self._sizes.model_type}"
                raise CheckpointError(what, where=path, do="Give --reference a directory with weights: towers are its.")
            self._towers = hints.towers
            weights |= {name.removeprefix(TOWERS): spec for name, spec in hints.towers.specs.items()}
        self.specs: Mapping[str, TensorSpec] = weights
        padded = (place for place in self._places.values() if place.most is not None)
        self.padding = max((place.array.shape[place.outputs[0]] - place.shape[0] for place in padded), default=0)
        if codes := [name for name, spec in self.specs.items() if spec.is_codes]:
            what = f"`{codes[0]}` is {self.specs[codes[0]].dtype}: FP8 codes, which nothing says the scales of"
            raise CheckpointError(what, where=path, do="Save the weights in BF16.")

    def _by_kind(self) -> dict[str, dict[str, ZarrArray]]:
        """The arrays of parameters, and of each kind of moments, by the parameter's name. Others are `not_carried`."""
        found: dict[str, list[tuple[str, str, ZarrArray]]] = {}
        for name, array in self._arrays.items():
            if (match := _MOMENT.fullmatch(name)) and array.dtype.is_floating_point and array.dtype.itemsize > 1:
                kind, parameter = _KINDS[match[1]], match[2]
            elif name == "step" or _COUNT.fullmatch(name):
                continue
            elif name.startswith(("opt_state.", AUX)) or _GENERATORS.fullmatch(name):
                self.not_carried.append(name)
                continue
            else:
                # As MaxText's converter has it: numbers of layers belong to the word before them, and the `value` of a
                # variable of NNX is no part of the name
                inside = name[outer.end() :] if (outer := _PARAMETERS.match(name)) else name
                kind, parameter = "", re.sub(r"(?<=[^.])\.(\d+)(?=\.)", r"_\1", inside).removesuffix(".value")
            found.setdefault(kind, []).append((name, parameter, array))
        return {kind: by_model_names(arrays, self._item) for kind, arrays in found.items()}

    def notes(self) -> Iterator[str]:
        if self.not_carried:
            arrays = counted(len(self.not_carried), "array")
            yield f"Not carried over from the run: {arrays} of its optimizer and other state."
        if self.padding:
            yield f"{counted(self.padding, 'row')} with which MaxText pads the vocabulary are left out."
        if says_its_model(self) and (family := FAMILIES.get(self.model.architecture)) and family.pairs_by:
            beside = any(place.pairs for place in self._places.values())
            yield (
                "Nothing in the checkpoint says how the numbers of a rotary pair lie in its queries and keys: "
                f"{'beside each other' if beside else 'in the halves of a head'}, as MaxText has them with the rotary "
                "scaling that config.json says."
            )

    def _placed(self, kind: str, arrays: Mapping[str, ZarrArray]) -> Iterator[tuple[str, HfRows]]:
        """Hugging Face's tensors, by name: weights or moments of a `kind`. Those that nothing says the model of are as
        they are stored."""
        if not says_its_model(self):
            for name, array in arrays.items():
                if name.startswith(STATE):
                    raise DamagedCheckpoint(f"`{name}` is named as the state of an optimizer", where=self._item)
                dimensions = tuple(range(len(array.shape)))
                yield name, HfRows(self._decoded, array, dimensions[:1], dimensions[1:])
            return
        model = self._sizes
        if (family := FAMILIES.get(model.architecture)) is None:
            what = f"a {model.model_type}, whose parameters' names in MaxText are not known here"
            raise UnknownArchitecture(what, where=self._item, do=f"Known: {', '.join(FAMILIES)}.")
        for name, array in arrays.items():
            place = placed(name, family, model)
            if place is None:
                what = f"`{array.name}` is no parameter that MaxText has of a {model.model_type}"
                raise UnmappedTensor(what, where=self._item, do="Is the reference this model's?")
            for hf, rows in hf_rows(self._decoded, array, place, family, model, kind):
                yield model.wrapper.name_of(hf) if model.wrapper else hf, rows

    @cached_property
    def _sizes(self) -> ModelShape:
        """The model as config.json describes it, whatever tensors there are. Raises UnknownArchitecture."""
        path = self.companions.config_path
        return from_hf_config(parse_json(self.companions.files["config.json"], path), path)

    @property
    def unsupported_state(self) -> str:
        """In words, the optimizer state that is not AdamW's, such as that of MaxText's `adam_pax` or `muon`."""
        others = [
            name for name in self.not_carried if name.startswith("opt_state.") and re.search(r"\.(mu|nu)\.", name)
        ]
        return f"{shown(min(others))} and its like, which are not optax's AdamW" if others else ""

    @cached_property
    def trainer_run(self) -> TrainerRun:
        """AdamW's count. Raises CheckpointError where nothing says it."""
        counts = [name for name in self._arrays if (match := _COUNT.fullmatch(name)) and match[1] == "0"]
        if len(counts) != 1:
            what = f"{listed(counts)} are both counts of updates" if counts else NO_COUNT
            raise CheckpointError(what, where=self.path, do=DROP_OPTIMIZER)
        left = [_SETTINGS]
        if any(place.times * place.over != 1.0 for name, place in self._places.items() if name in self.specs):
            left.append(_SCALED)
        if any(name.startswith(AUX) for name in self.not_carried):
            left.append(f"what is in {AUX.rstrip('.')}")
        return adam_run(self._number(counts[0]), (), self.path, *left)

    @cached_property
    def iteration(self) -> int | None:
        """The step that the state has, else that of the directory; None for weights alone."""
        if "step" in self._arrays:
            return self._number("step")
        steps = [name for name in map(own_name, (self._item, above(self._item))) if name.isdecimal()]
        return int(steps[0]) if steps else None

    def _number(self, name: str) -> int:
        array = self._arrays[name]
        if math.prod(array.shape) != 1 or array.dtype.is_floating_point:
            raise DamagedCheckpoint(f"`{name}` is {list(array.shape)} of {array.dtype}, and no count", where=self._item)
        return number(self._decoded.read(array, [range(1)] * len(array.shape)).item(), self._item)

    def chunks(self, name: str) -> Sequence[Chunk]:
        if self._towers is not None and name not in self._places:
            return self._towers.chunks(TOWERS + name)
        place = self._places[name]
        return [Chunk(whole(TensorSpec(place.shape, place.array.dtype)), place)]


def recognise(path: Path) -> bool:
    """Whether `path` has a state of Orbax's, or steps with one."""
    return path.is_dir() and (item_in(path) is not None or bool(steps_in(path)))


CONTAINER = Container(
    recognise,
    OrbaxReader,
    "_METADATA or manifest.ocdbt of Orbax (MaxText), there, in `items`, or in a step's directory",
)
