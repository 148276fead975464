"""What happens to a tensor's numbers on the way: encoding into FP8, and the FP8 state of the result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Granularity = Literal["tensor", "channel"]


@dataclass(frozen=True)
class Encode:
    """Encode a job's tensors in E4M3.

    Granularity `tensor`: one scale for all tensors of the job, from their joint amax (engines fuse q/k/v and
    gate/up, and requantize where their scales differ). `channel`: one per output row. `weight_scales` names the
    tensor that receives each written tensor's `scale_inv`; `input_scales` gives tensors and their values.
    """

    granularity: Granularity
    weight_scales: Mapping[str, str]
    input_scales: Mapping[str, float]

    def describe(self) -> dict[str, object]:
        return {
            "granularity": self.granularity,
            "weight_scales": dict(self.weight_scales),
            "input_scales": dict(self.input_scales),
        }
