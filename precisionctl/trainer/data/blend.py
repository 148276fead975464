"""Several data sets blended by weights: rows of each come exactly as often as its weight says, evenly spread."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from precisionctl.recipe import Data
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data.batch import Batch, make_batch
from precisionctl.trainer.data.order import BlendedOrder, turns_of
from precisionctl.trainer.data.rows import Rows, load_rows
from precisionctl.trainer.data.store import OnTokens


@dataclass(frozen=True)
class Blend:
    """Data sets concatenated to one: their rows are numbered consecutively. `weights`, above 0, are relative numbers of
    rows, of any sum."""

    parts: Sequence[Rows]
    weights: Sequence[float]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def has_equal_rows(self) -> bool:
        """As `Rows.has_equal_rows`: a recipe has one length for all of them."""
        return all(part.has_equal_rows for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of the data that is trained on, and of how often."""
        lines = [f"{turns} {part.fingerprint}" for turns, part in zip(turns_of(self.weights), self.parts, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def require_vocabulary(self, size: int) -> None:
        """Raise DataError for a token that a model with `size` of them does not know."""
        for part in self.parts:
            part.require_vocabulary(size)

    def shared_by(self, ranks: int) -> "Blend":
        return replace(self, parts=[part.shared_by(ranks) for part in self.parts])

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, padded at the right."""
        first = [0, *accumulate(map(len, self.parts))]
        owners = [bisect_right(first, number) - 1 for number in numbers]
        rows = [self.parts[part].pieces(number - first[part]) for number, part in zip(numbers, owners, strict=True)]
        return make_batch(rows, self.parts[0].padding, self.parts[0].ranks)

    def order(self, seed: int) -> BlendedOrder:
        return BlendedOrder([len(part) for part in self.parts], self.weights, seed)


def load_data(data: Data, tokenizer: Tokenizer, cache: Path | None, on_tokens: OnTokens) -> Rows | Blend:
    """The data of a recipe. Raises as `load_rows`."""

    def load(path: str) -> Rows:
        length, packing = data.sequence_length, data.packing
        return load_rows(path, tokenizer, length, packing=packing, cache=cache, on_tokens=on_tokens)

    if not data.blend:
        return load(data.path)
    return Blend([load(share.path) for share in data.blend], [share.weight for share in data.blend])
