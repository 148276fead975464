"""PyTorch's distributed checkpoints (DCP) that are not `torch_dist`: with Hugging Face's names, torchtitan's,
OLMo-core's, or Megatron-FSDP's. What `.metadata` says, also in Megatron's own, is read by
`torch_files/dcp_metadata.py`."""

from precisionctl.checkpoints.dcp.fsdp_dtensor import CONTAINER

__all__ = ["CONTAINER"]
