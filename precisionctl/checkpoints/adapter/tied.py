"""Adapters of an embedding and the output layer that is tied to it: the merged model stores one tensor for both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.adapter.low_rank import LowRank
from precisionctl.checkpoints.chunks import Chunked, read_tensor
from precisionctl.errors import MappingError
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.torch_when_used import torch

_EMBEDDING = re.compile(r"(?:.+\.)?(?:embed_tokens|embed_in|embed_out|wte|word_embeddings|embeddings|lm_head)\.weight")


def is_embedding(weight: str) -> bool:
    """Whether a weight is an embedding or an output layer, by its name."""
    return _EMBEDDING.fullmatch(weight) is not None


def tied_embeddings(model: ModelShape, stored: Collection[str]) -> Mapping[str, str]:
    """For each output layer that a base ties to its embedding, by the weight's name: that of the embedding. Of a model
    without a table none is known."""
    if isinstance(model, UntabledModel) or not model.tied_embeddings:
        return {}
    return {one.hf: one.of for one in table_of(model).aliases if one.switch == "tied_embeddings" and one.of in stored}


def check_known(model: ModelShape, adapted: Iterable[str]) -> None:
    """Raise MappingError for `ensure_weight_tying` of a model without a table, if an embedding is adapted."""
    if isinstance(model, UntabledModel) and any(map(is_embedding, adapted)):
        raise MappingError("ensure_weight_tying is read for the families that have a table alone", do=_NOT_BY_PEFT)


def check_same_change(head: LowRank, embedding: LowRank | None, adapter: Chunked) -> None:
    """Raise MappingError if an output layer and its embedding have not the same change, as `ensure_weight_tying` says:
    the layer's factors `[rank, width]` and `[tokens, rank]` are the embedding's `[rank, tokens]` and `[width, rank]`,
    exchanged and transposed (peft 0.21, tuners/lora/model.py). They are not for a base that peft had in BF16: it makes
    FP32 of each factor, and so of one tensor two."""
    if embedding is not None and embedding.scale == head.scale:
        pairs = ((head.a, embedding.b), (head.b, embedding.a))
        if all(adapter.specs[one].shape == adapter.specs[other].shape[::-1] for one, other in pairs) and all(
            torch.equal(read_tensor(adapter, one), read_tensor(adapter, other).t()) for one, other in pairs
        ):
            return
    what = "ensure_weight_tying: the adapter changes the output layer otherwise than the embedding that it is tied to"
    raise MappingError(f"{what} (peft unties them where the base is not in FP32)", do=_NOT_BY_PEFT)


_NOT_BY_PEFT = "Train it without the embedding. peft's own merge (0.21.2) adds the changes of both to the one tensor."


def check_touched(model: ModelShape, stored: Collection[str], touched: Collection[str]) -> None:
    """Raise MappingError if an adapter changes only one of two tied tensors, embedding and output layer: the merged
    model would need both, and the base stores one."""
    if isinstance(model, UntabledModel):
        ends = [name for name in touched if is_embedding(name)]
        apart = len(ends) == 1 and model.config.get("tie_word_embeddings") is not False
    else:
        apart = any((of in touched) != (hf in touched) for hf, of in tied_embeddings(model, stored).items())
    if apart:
        raise MappingError(
            "the base ties its embedding and its output layer, and the adapter changes one of the two",
            do="Untie them in the base first: store both, and set tie_word_embeddings to false in its config.json.",
        )
