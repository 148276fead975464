"""How the weights of one job become FP8 codes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Encode:
    """Encode tensors of a job, each in its target's dtype.

    `blocks` says how many rows and columns of each share a scale; what it leaves out stays values. `shared`: all have
    the one scale that their joint amax gives (engines fuse q/k/v and gate/up, and requantize where their scales
    differ), and `alongside` are weights that share it and that other jobs encode: where the source has each.
    `weight_scales` names the tensor that receives each one's `scale_inv`; `input_scales` gives tensors and their
    values.
    """

    blocks: Mapping[str, tuple[int, int]]
    weight_scales: Mapping[str, str]
    input_scales: Mapping[str, float]
    shared: bool = False
    power_of_2: bool = False
    alongside: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        return asdict(self)
