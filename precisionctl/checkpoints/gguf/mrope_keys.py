"""What the metadata of a text model say for images, which llama.cpp has from a second file (`mmproj`). Of text alone it
computes the same with any: there all dimensions of a position are one.

Source: llama.cpp's conversion/base.py (set_gguf_parameters) and conversion/qwen3vl.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import GgufEntry, Said, ignored_keys, refused
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.untrusted.safe_json import mapping_or_empty


@dataclass(frozen=True)
class Images:
    """Which pairs of a head's channels go by time, height and width (`mrope_section`), and how many of a tower's layers
    add to the text model's (`deepstack_visual_indexes`): those of the published models."""

    pairs: tuple[int, int, int]
    deepstack: int = 0

    @property
    def sections(self) -> GgufEntry:
        return ignored_keys("rope.dimension_sections", write=self._write_sections)

    def recognises(self, file: Described) -> bool:
        """Whether llama.cpp turns heads of a file's model by such pairs (`llama_hparams::use_mrope`)."""
        said = file.said("rope.dimension_sections")
        return isinstance(said, list) and len(said) > 1 and all(type(each) is int and each > 0 for each in said[:2])

    @property
    def deepstack_layers(self) -> GgufEntry:
        return ignored_keys("n_deepstack_layers", write=lambda model: {"n_deepstack_layers": self.deepstack})

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise UnknownArchitecture if a config.json, with what it says of its text model, says others."""
        rope, tower = (config.get("rope_parameters") or config.get("rope_scaling"), config.get("vision_config"))
        both = {**mapping_or_empty(rope), **mapping_or_empty(tower)}
        pairs, layers = both.get("mrope_section"), both.get("deepstack_visual_indexes")
        if pairs not in (None, [*self.pairs]) or (isinstance(layers, list) and len(layers) != self.deepstack):
            said = f"mrope_section is {shown(pairs)}, and deepstack_visual_indexes are {shown(layers)}"
            known = f"models of this family have {shown([*self.pairs])}, and {self.deepstack} indexes"
            do = "llama.cpp's convert_hf_to_gguf.py writes what config.json says."
            raise UnknownArchitecture(f"{said}; {known}", do=do)

    def _write_sections(self, model: ModelShape) -> Said:
        if model.rotary_size > 2 * sum(self.pairs):
            raise refused(model, f"that turns {model.rotary_size} channels of a head")
        return {"rope.dimension_sections": [*self.pairs, 0]}
