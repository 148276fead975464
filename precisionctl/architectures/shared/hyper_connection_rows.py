"""Rows of several residual streams, by the names of Megatron-Core's hyper_connection.py, FP32 as released.

Trap: the scales of a hyper-connection are one tensor in Hugging Face.
"""

from precisionctl.architectures.param_map import Row
from precisionctl.architectures.rearrangements import SCALAR


def hyper_connection(hf: str, block: str, scales: tuple[str, ...]) -> tuple[Row, ...]:
    """What joins a `block` of Megatron's layer to the streams. `hf` is what Hugging Face's names begin with; `scales`
    are Megatron's names of the one of Hugging Face."""
    megatron = f"decoder.layers.{{layer}}.{block}_hyper_connection."
    return (
        Row(f"{hf}fn", f"{megatron}mapping_proj.weight", ("mhc.mapping_size", "streams_size"), keeps_dtype=True),
        Row(f"{hf}base", f"{megatron}bias", ("mhc.mapping_size",), keeps_dtype=True),
        *(
            Row(f"{hf}scale[{number}]", f"{megatron}alpha_{kind}", (1,), SCALAR, keeps_dtype=True)
            for number, kind in enumerate(scales)
        ),
    )


def head(hf: str, megatron: str) -> tuple[Row, ...]:
    """What makes one of the streams; `hf` and `megatron` are what the names begin with."""
    shapes = {"fn": ("mhc.num_residual_streams", "streams_size"), "base": ("mhc.num_residual_streams",), "scale": (1,)}
    return tuple(
        Row(f"{hf}{name}", f"{megatron}hc_head_{name}", shape, keeps_dtype=True) for name, shape in shapes.items()
    )
