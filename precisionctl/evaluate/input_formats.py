"""What engines round the inputs of stored codes to, as the config says it.

Which format a weight has follows from its tensors. Of inputs there is no tensor where engines make their scales. So
where a config has formats that differ in these alone, its lists of modules decide, matched as vLLM matches them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.engines.rules.config_groups import Targets
from precisionctl.engines.rules.ignore_lists import BY_GLOB, names_in_layers
from precisionctl.errors import PrecisionError
from precisionctl.quant_methods.base import CodeFormat, InputFormat, QuantMethod, sized

_OF_CLASSES = ("Linear", "")
"""Targets that mean all linears that no other target names: theirs first, then the config's own default."""

Inputs = set[InputFormat | None]
"""What the inputs of a weight may become; None: they stay as they are."""


class InputFormats:
    """The InputFormat of each weight that is stored as codes in a directory of a quant method.

    All formats of the config that a weight's codes and scales can have mostly round inputs alike. Where they do not, it
    is the format of the first target in the config's lists that means the weight's module.
    """

    def __init__(self, encodings: WeightEncodings, method: QuantMethod) -> None:
        self._encodings = encodings
        quantization = method.read(encodings.quantization)
        self._by_target, self._all = quantization.by_target, quantization.formats
        self._named = _targets_naming(method, self._by_target, encodings)

    def of(self, names: Sequence[str]) -> InputFormat | None:
        """What the inputs of weights become that are computed as one; None where these stay as they are. Raises
        PrecisionError where the config does not say it, or not the same of all."""
        found = {made for name in names for made in self._of(name)}
        if len(found) != 1:
            what = f"the config has several formats of inputs, and does not give `{names[0]}` one of them"
            raise PrecisionError(what, where="config.json", do="Compare its groups with the names of the weights.")
        return found.pop()

    def _of(self, name: str) -> Inputs:
        """What the inputs of a weight may become, by all that the config says."""
        by_form = self._fitting(name, self._all)
        if len(by_form) == 1:
            return by_form
        for target in (*self._named(name.partition("[")[0].removesuffix(".weight")), *_OF_CLASSES):
            if by_list := self._fitting(name, self._by_target.get(target, ())):
                return by_list
        return by_form

    def _fitting(self, name: str, forms: Sequence[CodeFormat]) -> Inputs:
        """What those of the formats round inputs to that a weight's codes and scales can have."""
        spec, block = self._encodings.weights[name], self._encodings.scales[name].block
        return {form.inputs for form in forms if form.packing == spec.packing and sized(form.block, spec) == block}


def _targets_naming(
    method: QuantMethod, targets: Mapping[str, Sequence[CodeFormat]], encodings: WeightEncodings
) -> Callable[[str], Iterable[str]]:
    """The targets that name a module, that which counts first, as the method matches them."""
    if method.name not in ("compressed-tensors", "quark"):
        return names_in_layers
    if method.name == "quark":
        first = BY_GLOB.first(targets)
    else:
        first = Targets(targets, {name.removesuffix(".weight") for name in encodings.weights}, fuses=True).of
    return lambda module: [target] if (target := first(module)) else []
