"""AutoRound's integers, which are packed as GPTQ's or AWQ's: what its config says of them.

Modules may have bits and groups of their own (`extra_config`), by their names or by patterns of names. A stranger's
patterns are not matched: the shapes of a module's tensors say which of these settings it has. Source: AutoRound 0.16.1
(inference/convert_model.py, convert_hf_model, get_layer_config; inference/backend.py, GPTQ_FORMAT); the defaults are
those of transformers' AutoRoundConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.decoded.transposed_codes import TransposedCodes, WordLayout
from precisionctl.errors import PrecisionError, shown

_LIKE_GPTQ, _LIKE_AWQ = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round:auto_awq", "auto_round:awq")
_ITS_OWN = ("auto_round", "auto_round:gptqmodel")
"""Its `packing_format`s: GPTQ's with zero points that are stored one less, AWQ's, and GPTQ's with those that they
are."""

_NOT_READ = ("rotation_config", "spinquant_config", "super_bits", "super_group_size")
"""Settings by which values would be others: weights that have been rotated, and scales that are codes too."""


class AutoRoundCodes(TransposedCodes):
    """The weights of an AutoRound directory."""

    def _layout(self, quantization: Mapping[str, Any]) -> WordLayout:
        packing = quantization.get("packing_format", _LIKE_GPTQ[1])
        if not isinstance(packing, str) or packing not in (*_LIKE_GPTQ, *_LIKE_AWQ, *_ITS_OWN):
            raise self._unread(f"codes of AutoRound in the `packing_format` {shown(packing)}, which are not read")
        self._check_alike(quantization)
        groups, bits = list[int](), list[object]()
        # those of modules' own without those of more than 8 bits, which AutoRound writes for what it leaves as it is
        own = self._objects(quantization, "extra_config").values()
        coded = [said for said in own if not (type(number := said.get("bits")) is int and number > 8)]
        for settings in ({"group_size": 128, "bits": 4} | dict(quantization), *coded):
            said = {key: value for key, value in settings.items() if value is not None}
            if strange := next((name for name in _NOT_READ if said.get(name)), None):
                raise self._other(strange, said[strange])
            if said.get("data_type", "int") != "int":
                raise self._other("data_type", said["data_type"])
            if said.get("act_bits", 16) not in (16, 32):
                raise self._other("act_bits", said["act_bits"])
            if "group_size" in said:
                groups.append(self._group_size(said))
            if "bits" in said:
                bits.append(said["bits"])
        return WordLayout(packing in _LIKE_AWQ, packing in _LIKE_GPTQ, groups, bits)

    def _other(self, key: str, value: object) -> PrecisionError:
        return self._unread(f"codes of AutoRound with `{key}` {shown(value)}, which are not read")
