"""evaluate: the quality of a checkpoint, in the precision that it is stored in.

stored.py  a model that computes as an engine would         stored_codes.py  its linears whose weights are codes
quantizers.py  how the tensors of its GEMMs are cast        input_formats.py  what engines round inputs to
measure.py  perplexity, and the distance from a reference   harness.py  lm-eval's tasks
"""

from precisionctl.evaluate.measure import Evaluation, evaluate
from precisionctl.evaluate.stored import load

__all__ = ["Evaluation", "evaluate", "load"]
