"""Training data: files into samples, samples into tokens on a disk, tokens into rows, rows into batches.

find.py    a path -> its records  store.py     tokens -> memory-mapped files
formats/   files -> records       rows.py      -> rows, cut or packed
hf_datasets.py  the Hub's, too    blend.py     several data sets by weights
records.py  what records are      order.py     which rows come when
shapes.py  records -> samples     feed.py      a rank's share of them, as batches
tokenize.py  samples -> tokens    batch.py     tokens, labels, padding, sequences
megatron.py  .bin and .idx        corpus.py    writes those
"""

from precisionctl.trainer.data.batch import IGNORED, Batch
from precisionctl.trainer.data.blend import Blend, load_data
from precisionctl.trainer.data.feed import Feed, share_of
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
    "load_data",
    "load_rows",
    "share_of",
]
