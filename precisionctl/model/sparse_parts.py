"""Attention of some models to chosen keys: those that an indexer finds, as tokens or in blocks, and compressed ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_parts import LARGEST, check_count, check_numbers, check_size


@dataclass(frozen=True)
class DSA:
    """DeepSeek's sparse attention; the fields are Megatron's `--dsa-indexer-*`. `layers` says for each layer whether it
    has an indexer, whose `n_heads` heads of `head_dim` channels choose the `topk` keys that a query sees. A layer
    without one uses the keys that the last indexer before it chose; of layers without attention it says nothing. The
    first channels of a head have positions, of neighbouring pairs if `rope_interleaved`. With `kpool` (GLM-5.3) an
    indexer chooses pools of so many keys in a row, by their mean with learned weights, and also the keys behind the
    last whole pool. Where a text has no more than `topk` tokens, all are chosen."""

    n_heads: int
    head_dim: int
    topk: int
    layers: tuple[bool, ...]
    rope_interleaved: bool = False
    kpool: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "dsa")
        if self.kpool is not None and self.topk % self.kpool:
            raise DamagedCheckpoint(f"an indexer chooses {self.topk} keys in pools of {self.kpool}")
        if not any(self.layers[:1]):
            raise DamagedCheckpoint("the first layer has no indexer, and no layer before it to choose its keys")

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True)
class MSA:
    """MiniMax's sparse attention (arXiv 2606.13392). In the `layers` that have an indexer (an entry for each), its
    `n_heads` heads of `head_dim` channels choose the blocks of `block_size` keys that a query sees, each head for its
    share of the query heads: the last `local_blocks` up to the query's own, and the best others, `topk_blocks` in all.
    A block is worth its best key's product with the query. Where a text has no more than `topk_blocks` blocks, all are
    chosen.

    Of `averaged` blocks (Qwen4-Exp's QSA) each has one key, the mean of its keys, normalised then and turned as its
    first. It is worth the sum of the products with all heads' queries, those below 0 left out, and chosen for all query
    heads. Only blocks that end before the query, or with it, are chosen from; the keys behind them are all seen."""

    n_heads: int
    head_dim: int
    block_size: int
    topk_blocks: int
    local_blocks: int
    layers: tuple[bool, ...]
    averaged: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "msa", counts=("local_blocks",))
        check_count(self.local_blocks, "msa.local_blocks", self.topk_blocks)
        check_size(self.query_size, "rows of an indexer's queries", 4 * LARGEST)

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim

    @property
    def query_key_size(self) -> int:
        """Rows of its queries and its key together."""
        return self.query_size + self.head_dim

    @property
    def dense_length(self) -> int:
        """Tokens of the longest text of which all blocks are chosen."""
        return self.topk_blocks * self.block_size + (self.block_size - 1) * self.averaged


@dataclass(frozen=True)
class CSA:
    """DeepSeek-V4's attention, with one key for all heads, which is also the value (its report, section 2.3). Each
    query sees the last `window_size` tokens. `pattern` says for each layer what it sees beside them: nothing (W), or
    compressed keys, each made of as many tokens as RATIOS says: the `topk` of overlapping ones that an indexer chooses
    (C), or all of those without overlap (H).

    Queries are made of a latent of `q_lora_rank` channels. What heads give is projected in `o_groups` groups to
    `o_lora_rank` channels each, and these together. An indexer has `n_heads` heads of `head_dim` channels. Fields are
    those of Megatron's dev branch, but for `pattern`, which are the letters of its hybrid layers; `n_heads`, `head_dim`
    and `topk` are its `--dsa-indexer-*`.
    """

    pattern: str
    window_size: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_heads: int
    head_dim: int
    topk: int

    RATIOS: ClassVar[Mapping[str, int]] = {"W": 0, "C": 4, "H": 128}

    def ratios(self, ahead: int) -> list[int]:
        """How many tokens a key is made of, by layer, those of multi-token prediction, which see the window alone,
        included."""
        return [*(self.RATIOS[kind] for kind in self.pattern), *[0] * ahead]

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not {*self.pattern} <= self.RATIOS.keys():
            raise DamagedCheckpoint(f"a pattern of layers {shown(self.pattern)}", do="Known are W, C and H.")
        check_numbers(self, "csa")
        for product in ("query_size", "grouped_size"):
            check_size(getattr(self, product), product, 4 * LARGEST)

    @property
    def query_size(self) -> int:
        """Rows of the indexer's query projection."""
        return self.n_heads * self.head_dim

    @property
    def overlapping_size(self) -> int:
        """Rows of the projections of an indexer's keys: of a token for its own window, and for the next."""
        return 2 * self.head_dim

    @property
    def grouped_size(self) -> int:
        """Channels that the groups of heads give together."""
        return self.o_groups * self.o_lora_rank
