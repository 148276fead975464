"""What engines round the inputs of stored codes to, as the config says it.

Which format a weight has follows from its tensors. Of inputs there is no tensor where engines make their scales. So
where a config has formats that differ in these alone, its lists of modules decide, matched as vLLM matches them.
"""

from collections.abc import Callable, Sequence

from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.engines.rules.config_groups import Targets
from precisionctl.engines.rules.ignore_lists import BY_GLOB, names_in_layers
from precisionctl.errors import PrecisionError
from precisionctl.quant_methods.base import CodeFormat, InputFormat, QuantMethod, sized

_OF_CLASSES = ("Linear", "")
"""Targets that mean all linears that no other target names: theirs first, then the config's own default."""


class InputFormats:
    """The InputFormat of each weight that is stored as codes in a directory of a quant method."""

    def __init__(self, encodings: WeightEncodings, method: QuantMethod) -> None:
        self._encodings = encodings
        quantization = method.read(encodings.quantization)
        self._by_target, self._all = quantization.by_target, quantization.formats
        self._first: Callable[[str], str | None] | None = None
        if method.name == "compressed-tensors":
            modules = {name.removesuffix(".weight") for name in encodings.weights}
            self._first = Targets(self._by_target, modules, fuses=True).of
        elif method.name == "quark":
            self._first = BY_GLOB.first(self._by_target)

    def of(self, names: Sequence[str]) -> InputFormat | None:
        """What the inputs of weights become that are computed as one; None where these stay as they are. Raises
        PrecisionError where the config does not say it, or not the same of all."""
        found = {made for name in names for made in self._of(name)}
        if len(found) != 1:
            what = f"the config has several formats of inputs, and does not give `{names[0]}` one of them"
            raise PrecisionError(what, where="config.json", do="Compare its groups with the names of the weights.")
        return found.pop()

    def _of(self, name: str) -> set[InputFormat | None]:
        found = self._fitting(name, self._all)
        if len(found) == 1:
            return found
        targets = self._targets(name.partition("[")[0].removesuffix(".weight"))
        return next(filter(None, (self._fitting(name, self._by_target[target]) for target in targets)), found)

    def _targets(self, module: str) -> list[str]:
        """The targets that mean a module, that which counts first."""
        named = names_in_layers(module) if self._first is None else filter(None, [self._first(module)])
        return [target for target in (*named, *_OF_CLASSES) if target in self._by_target]

    def _fitting(self, name: str, forms: Sequence[CodeFormat]) -> set[InputFormat | None]:
        """What those formats round inputs to that a weight's codes and scales can have."""
        spec, block = self._encodings.weights[name], self._encodings.scales[name].block
        return {form.inputs for form in forms if form.packing == spec.packing and sized(form.block, spec) == block}
