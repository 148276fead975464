"""Rows of layers with a gated delta net beside layers with attention (Qwen3-Next, Qwen3.5); names in Megatron are
Megatron-Core's (megatron/core/ssm/gated_delta_net.py).

Traps: in_proj's rows are in six parts of unequal size, which tensor parallelism cuts each by itself. The norm of the
delta net's output stores its factor; all other norms store it less one.
"""

from precisionctl.architectures.param_map import Either, Row, only_in
from precisionctl.architectures.rearrangements import GAMMA, ORDINARY_GAMMA, Rearrangement
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.param import COLUMNS, CONV_PARTS, IN_PROJ_PARTS, ROWS, Parallel

_HF, _MEGATRON = "model.layers.{layer}.linear_attn.", "decoder.layers.{layer}.self_attention."

CONV = Row(
    f"{_HF}conv1d.weight",
    f"{_MEGATRON}conv1d.weight",
    ("gdn.conv_size", 1, "gdn.conv_kernel_dim"),
    parallel=Parallel("rows", names=CONV_PARTS),
    parts="gdn.conv_parts",
)
OUT_PROJ = Row(
    f"{_HF}out_proj.weight",
    f"{_MEGATRON}out_proj.weight",
    ("hidden_size", "gdn.value_size"),
    parallel=COLUMNS,
    gemm=True,
)


def delta_net(arrangement: Rearrangement, *in_proj: str, values: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of attention's norm and of attention, in layers of both kinds. `in_proj` are the linears that Megatron's
    one is made of; of these exports leave `values` as they are: small ones, of which decay and learning rate are made.
    """
    return (
        *only_in("attention", (*llama.ATTENTION_NORM, *llama.ATTENTION)),
        *only_in(
            "gdn",
            (
                Row(
                    "model.layers.{layer}.input_layernorm.weight",
                    f"{_MEGATRON}in_proj.layer_norm_weight",
                    ("hidden_size",),
                    GAMMA,
                ),
                Row(
                    tuple(f"{_HF}{name}.weight" for name in in_proj),
                    f"{_MEGATRON}in_proj.weight",
                    ("gdn.in_proj_size", "hidden_size"),
                    arrangement,
                    Parallel("rows", names=IN_PROJ_PARTS),
                    parts="gdn.in_proj_parts",
                    gemm=True,
                    values=tuple(f"{_HF}{name}.weight" for name in values),
                ),
                CONV,
                Row(f"{_HF}dt_bias", f"{_MEGATRON}dt_bias", ("gdn.num_value_heads",), parallel=ROWS, keeps_dtype=True),
                Row(f"{_HF}A_log", f"{_MEGATRON}A_log", ("gdn.num_value_heads",), parallel=ROWS, keeps_dtype=True),
                Row(
                    f"{_HF}norm.weight",
                    f"{_MEGATRON}out_norm.weight",
                    ("gdn.value_head_dim",),
                    ORDINARY_GAMMA,
                    wide_beside=("A_log", "out_proj.weight"),  # A_log alone is FP32 in some releases
                ),
                OUT_PROJ,
            ),
        ),
    )


_PREDICTION = {"model.layers.{layer}.": "mtp.layers.{mtp}."}

DENSE: tuple[Row | Either, ...] = (*llama.MLP_NORM, *llama.MLP)
SPARSE: tuple[Row | Either, ...] = (*moe.MOE_NORM, *moe.ROUTER, *moe.GATED_SHARED_EXPERT, *moe.EXPERTS)
"""MLPs of layers, of both kinds."""


def prediction(*block: Row | Either) -> tuple[Row | Either, ...]:
    """The one layer of multi-token prediction, which has attention; `block` are the rows of its MLP."""
    layer = (
        row.renamed(_PREDICTION, llama.PREDICTION_LAYER) for row in (*llama.ATTENTION_NORM, *llama.ATTENTION, *block)
    )
    return llama.prediction_layer(("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"), layer)
