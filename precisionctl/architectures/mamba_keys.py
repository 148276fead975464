"""config.json's keys of the steps (dt) of Mamba-2 mixers, which Megatron-Core does not clamp."""

from precisionctl.architectures.config_keys import Config, Fields, Rule
from precisionctl.errors import UnknownArchitecture, shown


def step_limits(*keys: str) -> Rule:
    """Ranges of steps by these keys. Raises UnknownArchitecture for one that clamps any: Megatron-Core has none."""

    def read(config: Config, where: object) -> Fields:
        for key in keys:
            limit = config.get(key)
            if limit is not None and not _is_endless(limit):
                raise UnknownArchitecture(
                    f"no {config.get('model_type')} known here has {key}={shown(limit)}",
                    where=where,
                    do="Its table was made for steps that nothing clamps, as in Megatron-Core.",
                )
        return {}

    return Rule(keys, read)


def _is_endless(limit: object) -> bool:
    """Whether a range is from 0 to what no step in FP32 reaches: to infinity, as Python's JSON has it or transformers',
    or to 1e308, as Nemotron 3 Ultra has it."""
    if not isinstance(limit, list | tuple) or len(limit) != 2 or limit[0] != 0:
        return False
    end = limit[1]
    return end == {"__float__": "Infinity"} or (isinstance(end, float) and end > _LARGEST_FP32)


_LARGEST_FP32 = (2 - 2**-23) * 2.0**127
