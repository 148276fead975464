"""Rows of layers with Kimi delta attention beside layers with latent attention, under Kimi Linear's names; names in
Megatron are Megatron-Core's (ssm/gated_delta_net/kda.py, of Megatron-LM's dev branch).

Traps: published files have a convolution each for queries, keys and values, and transformers' class one in memory,
where what makes decays has a module of its own. Unlike that of another gated delta net the input projection has no norm
in it: other linears read what is normalised, too.
"""

from collections.abc import Sequence
from dataclasses import replace

from precisionctl.architectures.param_map import Row, only_in, renamed
from precisionctl.architectures.rearrangements import DELTA_NET_CONV, DELTA_NET_IN_PROJ, GAMMA, SAME, Rearrangement
from precisionctl.architectures.shared.delta_net_rows import CONV, OUT_PROJ
from precisionctl.param import KDA_PARTS, ROWS, Parallel

_HF, _MEGATRON = "model.layers.{layer}.self_attn.", "decoder.layers.{layer}.self_attention."


def kda(low_rank: bool, a_log: Rearrangement = SAME) -> tuple[Row, ...]:
    """Rows of a layer's delta attention, but for the norm before it, as published. With `low_rank` decays and gates are
    projected in two steps. Exports leave as they are what decays and learning rates are made of."""
    in_proj = [f"{_HF}{part}_proj.weight" for part in ("q", "k", "v", *(() if low_rank else ("f", "g")))]
    return only_in(
        "gdn",
        (
            Row(
                tuple(in_proj),
                f"{_MEGATRON}in_proj.weight",
                ("gdn.in_proj_size", "hidden_size"),
                DELTA_NET_IN_PROJ,
                Parallel("rows", names=KDA_PARTS[: len(in_proj)]),
                parts="gdn.in_proj_parts",
                gemm=True,
                values=tuple(in_proj[3:4]),  # of decays
            ),
            *(_LOW_RANK if low_rank else ()),
            Row(
                f"{_HF}b_proj.weight",
                f"{_MEGATRON}beta_proj.weight",
                ("gdn.num_value_heads", "hidden_size"),
                gemm=True,
                values=(f"{_HF}b_proj.weight",),
            ),
            replace(
                CONV,
                names=tuple(f"{_HF}{part}_conv1d.weight" for part in "qkv"),
                rearrangement=DELTA_NET_CONV,
                keeps_dtype=True,
            ),
            Row(f"{_HF}dt_bias", f"{_MEGATRON}dt_bias", ("gdn.key_size",), parallel=ROWS, keeps_dtype=True),
            Row(f"{_HF}A_log", f"{_MEGATRON}A_log", ("gdn.num_value_heads",), a_log, ROWS, keeps_dtype=True),
            Row(f"{_HF}o_norm.weight", f"{_MEGATRON}out_norm.weight", ("gdn.value_head_dim",), GAMMA),
            replace(OUT_PROJ, names=f"{_HF}o_proj.weight"),
        ),
    )


def _low_rank(gate: str, size: str, values: bool) -> tuple[Row, Row]:
    """The two steps to as many channels as `size` says; exports leave both as they are if they are `values`."""
    first, second = (f"{_HF}{gate}_{step}_proj.weight" for step in ("a", "b"))
    return (
        Row(
            first,
            f"{_MEGATRON}{gate}_a_proj.weight",
            ("gdn.kda_lora_rank", "hidden_size"),
            gemm=True,
            values=(first,) if values else (),
        ),
        Row(
            second,
            f"{_MEGATRON}{gate}_b_proj.weight",
            (size, "gdn.kda_lora_rank"),
            parallel=ROWS,
            gemm=True,
            values=(second,) if values else (),
        ),
    )


_LOW_RANK = (*_low_rank("f", "gdn.key_size", True), *_low_rank("g", "gdn.value_size", False))

_FORGET_GATE = {f"self_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_", "dt_bias", "A_log")}


def in_memory(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The same rows by the names that transformers' class has in memory."""
    (conv,) = (row for row in rows if row.megatron.endswith("conv1d.weight"))
    joined = replace(conv, names=f"{_HF}conv1d.weight", rearrangement=SAME)
    return tuple(joined if row is conv else each for row, each in zip(rows, renamed(rows, _FORGET_GATE), strict=True))
