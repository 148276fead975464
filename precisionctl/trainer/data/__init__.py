"""Training data: files into samples, samples into tokens on a disk, tokens into rows, rows into batches.

formats/   files -> records       store.py     tokens -> memory-mapped files
hf_datasets.py  the Hub's, too    rows.py      -> rows, cut or packed
shapes.py  records -> samples     blend.py     several data sets by weights
tokenize.py  samples -> tokens    order.py     which rows come when
megatron.py  .bin and .idx        feed.py      a rank's share of them, as batches
corpus.py  writes those           batch.py     tokens, labels, padding, sequences
"""

from precisionctl.trainer.data.batch import IGNORED, Batch
from precisionctl.trainer.data.blend import Blend, load_data
from precisionctl.trainer.data.feed import Feed, in_batches, share_of
from precisionctl.trainer.data.order import Order
from precisionctl.trainer.data.rows import Rows, load_rows
from precisionctl.trainer.data.store import OnTokens

__all__ = [
    "IGNORED",
    "Batch",
    "Blend",
    "Feed",
    "OnTokens",
    "Order",
    "Rows",
    "in_batches",
    "load_data",
    "load_rows",
    "share_of",
]
