"""Arguments of Megatron-Core's dev branch that describe DeepSeek-V4's residual streams, both ways."""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.megatron.args_said import needed
from precisionctl.model.model_parts import HyperConnections
from precisionctl.model.model_shape import ModelShape

MHC_NAME = "enable_hyper_connections"
_MHC = ("num_residual_streams", "mhc_sinkhorn_iterations")


def mhc_args(model: ModelShape) -> dict[str, Any]:
    """Arguments of several residual streams, which Megatron has beside compressed keys alone."""
    return {MHC_NAME: True, **{name: getattr(model.mhc, name) for name in _MHC}} if model.mhc and model.csa else {}


def read_mhc(args: Mapping[str, Any]) -> HyperConnections | None:
    """The inverse."""
    return HyperConnections(**{name: needed(args, name) for name in _MHC}) if args.get(MHC_NAME) else None
