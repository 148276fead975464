"""A key that a config.json lacks has the default of the family's class in transformers."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import pico
import pytest
from huggingface_hub.errors import StrictDataclassError
from installed import BEFORE_5_23
from soaking import in_soak
from transformers import AutoConfig, PretrainedConfig

from precisionctl.architectures.families import architecture_of, from_hf_config
from precisionctl.errors import PrecisionctlError

PASSED_OVER = {"num_nextn_predict_layers", "rotary_dim"}
"""Keys that classes have defaults of and models of transformers do not heed: layers of prediction, of which a directory
has those that it says, and MiniMax's second word for how many channels turn."""


def keys(family: str) -> set[str]:
    """What a family's entries of config.json read."""
    return {key for entry in architecture_of(pico.settings(family)["model_type"]).config for key in entry.keys}


def without_each(said: dict[str, Any], keys: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Configs that lack one key, or one within it."""
    for key in sorted(keys):
        rest = {name: value for name, value in said.items() if name != key}
        yield rest
        if isinstance(said[key], dict):
            yield from ({**rest, key: value} for value in without_each(said[key], said[key]))


def means_the_same(said: dict[str, Any], kind: type[PretrainedConfig]) -> bool:
    """Whether a config is taken, here and by its class, which fills it; then both must mean the same."""
    try:
        ours = from_hf_config(said)
        filled = from_hf_config(kind(**deepcopy(said)).to_dict())
    except (PrecisionctlError, KeyError, StrictDataclassError):
        return False
    assert ours == filled
    return True


NOT_WHOLE = {
    *("cohere-compass", "cohere-compass-turning"),
    *("deepseek", "deepseek-v2", "deepseek-v2-groups", "dots1", "kimi-k3", "lfm2-moe", "minimax-m3", "nemotron-nas"),
    "qwen4",
}
"""Families whose class by itself makes no model: it has null for some size, for the kinds of layers or for their rotary
embeddings, and MiniMax M3's two words for how many channels turn contradict each other."""

BRIEFLY = pico.first_of_each(keys)[:30]
LATER = [family for family in pico.FAMILIES if family not in BRIEFLY]


@pytest.mark.parametrize(
    ("family", "own_sizes", "at_once"),
    [
        *((family, each, each) for family in BRIEFLY for each in (True, False)),
        *in_soak(*((family, each, each) for family in LATER for each in (True, False))),
        *in_soak(*((family, own_sizes, not own_sizes) for family in pico.FAMILIES for own_sizes in (False, True))),
    ],
)
@pytest.mark.skipif(BEFORE_5_23, reason="defaults are those of 5.23")
def test_a_missing_key_means_what_its_class_takes(family: str, own_sizes: bool, at_once: bool) -> None:
    """Or is refused: sizes that every file says. One key is missing, or, as some default only counts then, all that may
    be; of a small model and of the class's own, as small ones have too few layers and experts for some."""
    small = AutoConfig.for_model(**pico.settings(family))
    kind = type(small)
    said = (kind() if own_sizes else small).to_dict()
    may_lack = keys(family) & said.keys() - PASSED_OVER
    if own_sizes and family in NOT_WHOLE:
        with pytest.raises(PrecisionctlError):
            from_hf_config(said)
        return
    if not at_once:
        assert any([means_the_same(rest, kind) for rest in without_each(said, may_lack)])
        return
    fewest = said
    for key in sorted(may_lack) * 2:
        less = {name: value for name, value in fewest.items() if name != key}
        if means_the_same(less, kind):
            fewest = less
    assert own_sizes or fewest.keys() < said.keys()
