"""evaluate: how good a checkpoint is, in the precision that it is stored in.

stored.py  a model that computes as an engine would     quantizers.py  how its GEMMs' tensors are cast
measure.py  perplexity, and how far from another one    harness.py  lm-eval's tasks
"""

from precisionctl.evaluate.measure import Evaluation, evaluate
from precisionctl.evaluate.stored import load

__all__ = ["Evaluation", "evaluate", "load"]
