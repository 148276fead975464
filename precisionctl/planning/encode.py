"""How the weights of one job become FP8 codes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from precisionctl.fp8.numerics import Numbers


@dataclass(frozen=True)
class Encode:
    """The weights of a job that become FP8 codes, each of its target's dtype, and the scales written beside them.

    `blocks`: by weight, how many rows and columns share a scale; tensors of the job that are not in it stay values.
    `weight_scales`: by weight, the tensor that receives its grid of `scale_inv`.
    `input_scales`: tensors whose one number is known already, and that number: scales of inputs, or of a KV cache.
    `shared`: all weights have the one scale that their joint amax gives, because engines compute q/k/v, and gate/up, as
    one and would requantize where scales differ.
    `alongside`: weights of other jobs that have that scale too, and the tensors of the source that they are read from.
    `numbers`: what new scales of weights are rounded up to.
    """

    blocks: Mapping[str, tuple[int, int]]
    weight_scales: Mapping[str, str]
    input_scales: Mapping[str, float]
    shared: bool = False
    numbers: Numbers = "FP32"
    alongside: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        return asdict(self)
