"""A key that a config.json lacks has the default of the family's class in transformers."""

import pico
import pytest
from installed import BEFORE_5_23
from transformers import AutoConfig

from precisionctl.architectures.families import architecture_of, from_hf_config
from precisionctl.errors import PrecisionctlError

PASSED_OVER = {"num_nextn_predict_layers", "rotary_dim"}
"""Keys that classes have defaults of and models of transformers do not heed: layers of prediction, of which a directory
has those that it says, and MiniMax's second word for how many channels turn."""


@pytest.mark.parametrize("family", pico.FAMILIES)
@pytest.mark.skipif(BEFORE_5_23, reason="defaults are those of 5.23")
def test_a_missing_key_means_what_its_class_takes(family: str) -> None:
    """Or is refused: sizes that every file says."""
    config = AutoConfig.for_model(**pico.settings(family))
    said = config.to_dict()
    table = architecture_of(from_hf_config(said).architecture)
    for key in sorted({key for entry in table.config for key in entry.keys} & said.keys() - PASSED_OVER):
        rest = {name: value for name, value in said.items() if name != key}
        try:
            ours = from_hf_config(rest)
        except PrecisionctlError:
            continue
        assert ours == from_hf_config(type(config)(**rest).to_dict()), key
