"""How a checkpoint's FP8 codes decode, read from its scale tensors when it is asked for."""

from collections.abc import Iterator, Mapping

from precisionctl.checkpoints.base import Chunked, read_tensor
from precisionctl.fp8.encoding import Encoding
from precisionctl.quant_methods.base import Scales, encoding


class StoredEncodings(Mapping[str, Encoding]):
    """The encodings of weights by name, from tensors in files. The grids of a large model are gigabytes with all its
    channels, so none is kept but the last: whoever decodes asks for one weight's many times over."""

    def __init__(self, stored: Chunked, scales: Mapping[str, Scales], where: object) -> None:
        self._stored, self._scales, self._where = stored, scales, where
        self._last: tuple[str, Encoding] | None = None

    def __getitem__(self, name: str) -> Encoding:
        if self._last is None or self._last[0] != name:
            scales = self._scales[name]
            scale = read_tensor(self._stored, scales.weight)
            self._last = name, encoding(scale, scales, self._stored.specs[name], self._where)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)

    def __contains__(self, name: object) -> bool:
        return name in self._scales
