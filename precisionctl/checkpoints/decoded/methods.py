"""Which file of this folder reads the codes of a `quant_method`."""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.decoded.aqlm_codes import AqlmCodes
from precisionctl.checkpoints.decoded.auto_round import AutoRoundCodes
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.bitnet_codes import BitNetCodes
from precisionctl.checkpoints.decoded.bitsandbytes_codes import BitsAndBytesCodes
from precisionctl.checkpoints.decoded.eetq_codes import EetqCodes
from precisionctl.checkpoints.decoded.fp_quant_codes import FPQuantCodes
from precisionctl.checkpoints.decoded.gemma_codes import GemmaCodes
from precisionctl.checkpoints.decoded.hqq_codes import HqqCodes
from precisionctl.checkpoints.decoded.inkling2_loop_codes import Inkling2LoopCodes
from precisionctl.checkpoints.decoded.metal_codes import MetalCodes
from precisionctl.checkpoints.decoded.mlx_codes import METHOD, MlxCodes
from precisionctl.checkpoints.decoded.quanto_codes import QuantoCodes
from precisionctl.checkpoints.decoded.sinq_codes import SinqCodes
from precisionctl.checkpoints.decoded.torchao_codes import TorchaoCodes
from precisionctl.checkpoints.decoded.transposed_codes import TransposedCodes
from precisionctl.checkpoints.decoded.vptq_codes import VptqCodes
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors
from precisionctl.quant_methods.coded_weights import quant_method_of

METHODS: Mapping[str, type[DecodedWeights]] = {
    "gptq": TransposedCodes,
    "awq": TransposedCodes,
    "auto-round": AutoRoundCodes,
    "bitsandbytes": BitsAndBytesCodes,
    "torchao": TorchaoCodes,
    "inkling2_loop": Inkling2LoopCodes,
    "bitnet": BitNetCodes,
    "gemma": GemmaCodes,
    "hqq": HqqCodes,
    "metal": MetalCodes,
    "fp_quant": FPQuantCodes,
    "aqlm": AqlmCodes,
    "vptq": VptqCodes,
    "sinq": SinqCodes,
    "eetq": EetqCodes,
    "quanto": QuantoCodes,
    METHOD: MlxCodes,
}
"""The reader of each of `quant_methods.coded_weights.AS_VALUES`."""


def decoded_weights(config: Mapping[str, Any], stored: StoredTensors, where: object) -> DecodedWeights | None:
    """The weights that are read as values among the `stored` tensors of a directory with this config.json; None if it
    names another method, or none. Raises as DecodedWeights."""
    method = quant_method_of(config)
    found = METHODS.get(method) if isinstance(method, str) else None
    return found(stored, config, where) if found else None
