"""Perplexity on text, and the distance of a checkpoint from a reference (KL divergence, top-1 agreement).

Memory does not grow with the text: tokens are memory-mapped and read in batches of rows, and logits are computed for
only as many positions at a time as fit into LOGITS_AT_A_TIME.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.checkpoints.base import Reader
from precisionctl.errors import DataError
from precisionctl.evaluate.stored import load
from precisionctl.paths import StrPath
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.data import IGNORED, Batch, load_rows
from precisionctl.trainer.model.computes import longest_text
from precisionctl.trainer.model.gpt import GPT

ROWS_AT_A_TIME = 4

LOGITS_AT_A_TIME = 1 << 24
"""Logits computed at once, positions times vocabulary: 64 MB in FP32. A few tensors of that size exist at a time."""

OnRows = Callable[[int, int], None]
"""Called with the number of rows evaluated so far, and the number of all rows."""


@dataclass(frozen=True)
class ReferenceComparison:
    """A reference on the same text: its `perplexity` and `loss`, computed in `precision`; `kl`, the mean over all
    targets of KL(reference || stored) of the next token's distribution, in nats; and `top1`, the share of targets (0
    to 1) at which both give the same token the highest probability."""

    perplexity: float
    loss: float
    precision: str
    kl: float
    top1: float


@dataclass(frozen=True)
class Evaluation:
    """`loss` is the mean cross entropy in nats over `tokens` targets, in `rows` of `sequence_length`; `perplexity` is
    its exponential; `precision` says in words how the model computed; `notes` what was left out of the data;
    `against` compares it with a reference."""

    perplexity: float
    loss: float
    tokens: int
    rows: int
    sequence_length: int
    precision: str
    notes: tuple[str, ...] = ()
    against: ReferenceComparison | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def best_device() -> str:
    """`cuda` if PyTorch finds a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def evaluate(
    reader: Reader,
    data: StrPath,
    *,
    against: Reader | None = None,
    sequence_length: int = 1024,
    device: torch.device | str | None = None,
    on_rows: OnRows = lambda done, total: None,
) -> Evaluation:
    """Perplexity of a checkpoint on text (any data that `resume` takes), with the checkpoint's tokenizer. `against` is
    a reference to compare with, which computes in the dtype that its values have, or decode to, never in FP8. Without
    `device`, on the GPU if there is one.

    The text is cut into rows of `sequence_length` targets (or the longest that the models compute, if that is shorter),
    each without the context of the previous one; a shorter remainder is dropped. Raises DataError for text or a
    tokenizer that cannot be used, and for a reference with another vocabulary.
    """
    device = device or best_device()
    readers = [reader] if against is None else [reader, against]
    length = min(sequence_length, *(longest_text(each.model) for each in readers))
    with open_tokenizer(reader.companions, reader.path) as tokenizer:
        rows = load_rows(data, tokenizer, length)
    rows.require_vocabulary(reader.model.vocab_size)
    model, precision = load(reader, device)
    if against is None:
        reference, reference_precision = None, ""
    else:
        size, of_other = reader.model.vocab_size, against.model.vocab_size
        if size != of_other:
            raise DataError(
                f"a vocabulary of {of_other} tokens cannot be compared with one of {size}",
                where=against.path,
                do="Give the checkpoint that the other one was made from.",
            )
        reference, reference_precision = load(against, device, plain=True)
    total, tokens = torch.zeros(4, dtype=torch.float64), 0
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, len(rows))
        batch = rows.batch(range(start, end)).to(model.output_weight.device)
        total += _sums(model, reference, batch)
        tokens += batch.targets
        on_rows(end, len(rows))
    loss, other, kl, agreed = (total / tokens).tolist()
    compared = ReferenceComparison(_perplexity(other), other, reference_precision, kl, agreed) if reference else None
    return Evaluation(_perplexity(loss), loss, tokens, len(rows), length, precision, rows.notes, compared)


def _perplexity(loss: float) -> float:
    return math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)


_LARGEST_EXPONENT = math.log(sys.float_info.max)
"""`math.exp` raises OverflowError above it; the loss of a broken model can be larger."""


@torch.no_grad()
def _sums(model: GPT, reference: GPT | None, batch: Batch) -> Tensor:
    """Sums over a batch's targets, FP64 `[4]`: cross entropy, the reference's cross entropy, KL divergence, and the
    number of targets for which both give the same token the highest probability; without a reference 0 of the last
    three."""
    wanted = batch.labels != IGNORED
    labels = batch.labels[wanted]
    models = [model, reference] if reference else [model]
    hidden = [each.hidden(batch.tokens, batch.padding_mask, batch.packed)[wanted] for each in models]
    total = torch.zeros(4, dtype=torch.float64)
    piece = max(1, LOGITS_AT_A_TIME // model.model.padded_vocab_size)
    for start in range(0, len(labels), piece):
        here = slice(start, start + piece)
        logs = []  # log probabilities, FP32 [positions, vocab_size], without the vocabulary's padding
        for each, values in zip(models, hidden, strict=True):
            logs.append(F.log_softmax(each.logits(values[here])[:, : each.model.vocab_size].float(), -1))
        measured = [F.nll_loss(log, labels[here], reduction="none") for log in logs]
        if reference:
            mine, others = logs
            measured.append(F.kl_div(mine, others, reduction="none", log_target=True).sum(-1))
            measured.append(mine.argmax(-1) == others.argmax(-1))
        total[: len(measured)] += torch.stack([each.double().sum() for each in measured]).cpu()
    return total
