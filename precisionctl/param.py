"""TensorSpec, the description of a logical tensor; how parallelism divides tensors; and what their names say: of which
stack a tensor is a slice, and of which parameter it is an optimizer's state.

Names are logical: one for each layer and expert, without rank, stage or stacking.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from precisionctl.codes.elements import FP8, Element, Packing
from precisionctl.dtypes import DType

Layout = Literal["hf", "megatron"]


@dataclass(frozen=True)
class Parallel:
    """How tensor parallelism cuts a tensor. `replicated`: every rank has all of it. `rows`: along dimension 0, each of
    its `parts` (gate and up) separately; `parts` has their relative sizes. `columns`: along dimension 1. `torch_dist`
    stores parts with `names` apart.
    """

    kind: Literal["replicated", "rows", "columns"]
    parts: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ()

    def rows_of_parts(self, rows: int) -> list[int]:
        """The rows of each part, of so many in all."""
        return [rows * part // sum(self.parts) for part in self.parts]


REPLICATED = Parallel("replicated")
ROWS = Parallel("rows")
GATED_ROWS = Parallel("rows", parts=(1, 1))
TWICE_GATED_ROWS = Parallel("rows", parts=(1, 1, 1))
COLUMNS = Parallel("columns")

IN_PROJ_PARTS = ("query", "key", "value", "z", "beta", "alpha")
CONV_PARTS = IN_PROJ_PARTS[:3]
"""Parts of a gated delta net's input projection and convolution, as torch_dist calls them
(megatron/core/ssm/gated_delta_net.py, sharded_state_dict)."""

KDA_PARTS = (*CONV_PARTS, "g", "gate")
"""Of Kimi delta attention's input projection (megatron/core/ssm/gated_delta_net/kda.py, of Megatron-LM's dev branch):
the first three of it where decays and gates are projected in two steps."""

GATED_QKV_PARTS = ("_qkv", "_gate")
"""Of linear_qkv with a gate of each head (megatron/core/transformer/attention.py, of Megatron-LM's dev branch,
apply_head_wise_attn_gate_sharded_factory)."""

MIXER_PARTS = ("z", "x", "B", "C", "dt")
MIXER_CONV_PARTS = MIXER_PARTS[1:4]
"""The same of a Mamba-2 mixer (megatron/core/ssm/mamba_mixer.py)."""


@dataclass(frozen=True)
class Parallelism:
    """The parallel sizes of a Megatron run, which a checkpoint is cut for.

    `tensor`, `pipeline` and `expert` are as `--tensor-model-parallel-size` and so on. `virtual` is the number of stages
    on each pipeline rank. `expert_tensor` is the tensor-parallel size of experts (None: the same as `tensor`).
    `first_layers` and `last_layers` are the numbers of layers on the first and the last pipeline rank, if they differ
    from the others' (`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`).
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def ranks(self) -> int:
        """The number of GPUs of such a run. Attention is divided over `tensor` of the ranks of a pipeline stage, and
        experts over `expert` times `tensor_of(experts)` of the same ones (megatron/core/parallel_state.py)."""
        return self.pipeline * math.lcm(self.tensor, self.expert * self.tensor_of(experts=True))

    def tensor_of(self, *, experts: bool) -> int:
        """The tensor-parallel size of experts, or of everything else."""
        return (experts and self.expert_tensor) or self.tensor

    def layers_of_ranks(self, layers: int) -> list[int]:
        """The number of a model's layers on each pipeline rank, for sizes from `planning.checks.with_stages`."""
        ends = (self.first_layers, self.last_layers)
        given = [count for count in ends if count is not None]
        others = self.pipeline - len(given)
        middle = [(layers - sum(given)) // others] * others if others else []
        first, last = ([] if count is None else [count] for count in ends)
        return [*first, *middle, *last]

    def layers_of_stages(self, layers: int) -> list[int]:
        """The number of a model's layers in each virtual stage, in the order in which a batch passes through them:
        stage i of rank p has the number i * pipeline + p."""
        return [count // self.virtual for count in self.layers_of_ranks(layers)] * self.virtual


ONE_RANK = Parallelism()


def divides_heads(ranks: int, heads: int, groups: int) -> bool:
    """Whether tensor-parallel ranks get equal numbers of attention heads and of query groups; with fewer groups than
    ranks, whether each group goes to the same number of ranks (Megatron's TransformerConfig.__post_init__, vLLM's
    QKVParallelLinear)."""
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and parallel form of a logical tensor; no data. For codes other than FP8, `packing` says how a file
    holds them, and `dtype` is that of their bytes in memory; `shape` counts codes, not bytes."""

    shape: tuple[int, ...]
    dtype: DType
    parallel: Parallel = REPLICATED
    packing: Packing | None = None

    @cached_property  # this and the next three are used for every piece that is copied
    def rows(self) -> int:
        """Length of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @cached_property
    def columns(self) -> int:
        """Elements of a row: the product of all dimensions but the first."""
        return math.prod(self.shape[1:])

    @cached_property
    def width(self) -> int:
        """How many elements of `dtype` a row is stored in: `columns`, or for packed codes their bytes."""
        return self.packing.row_bytes(self.columns) if self.packing else self.columns

    @cached_property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    @property
    def is_codes(self) -> bool:
        """Whether it holds codes, which are numbers only with their scales."""
        return self.packing is not None or self.dtype in FP8

    @property
    def element(self) -> Element:
        """Of codes: their number format."""
        return self.packing.element if self.packing else FP8[self.dtype]

    @property
    def codes_name(self) -> str:
        """Of codes: the name of their format in words, such as MXFP4."""
        return self.packing.name if self.packing else "FP8"

    @property
    def stored_dtype(self) -> str:
        """PyTorch's name for what a file has."""
        return self.packing.element.stored if self.packing else self.dtype.value


@lru_cache(maxsize=4096)
def shared_spec(
    shape: tuple[int, ...], dtype: DType, parallel: Parallel = REPLICATED, packing: Packing | None = None
) -> TensorSpec:
    """A TensorSpec that equal tensors share: a model's 100,000 tensors have a few dozen different ones."""
    return TensorSpec(shape, dtype, parallel, packing)


GEMM_ALIGNMENT = 16
"""Both dimensions of every operand of an FP8 GEMM must be multiples of it (cuBLASLt's leading dimensions; TE checks it
in transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec; inference engines' CUTLASS kernels need it, too)."""


def gemm_misfit(shape: Sequence[int], kind: str = "FP8", multiple: int = GEMM_ALIGNMENT) -> str | None:
    """Why no GEMM of this kind takes an operand of this shape, in words; None if it does."""
    return f"{kind} GEMMs need multiples of {multiple}" if any(size % multiple for size in shape) else None


def is_slice(name: str) -> bool:
    """Whether a tensor is one expert's slice of a stored tensor of all of them, `….mlp.experts.down_proj[3]`."""
    return name.endswith("]")


def stack_and_slice(name: str) -> tuple[str, int | None]:
    """The stack that holds a tensor, and which slice of it it is; None for all of it."""
    stack, bracket, number = name.removesuffix("]").partition("[")
    return stack, int(number) if bracket else None


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Megatron's names of the embedding and of the output layer."""

STATE = "optimizer.state."
"""Prefix of an optimizer's tensors, `optimizer.state.<kind>.<parameter>`, with the parameter's name in its layout."""

Kind = Literal["param", "exp_avg", "exp_avg_sq", "momentum_buffer"]
"""What a checkpoint keeps of a parameter, under Megatron's names: FP32 master weights, and an optimizer's state."""

KINDS: tuple[Kind, ...] = ("param", "exp_avg", "exp_avg_sq")
"""What it keeps of each parameter that Adam trains: the master weight and two moments, all FP32."""

MOMENTS: tuple[str, ...] = KINDS[1:]
"""The moments alone."""

MOMENTUM: Kind = "momentum_buffer"
"""The state that Muon keeps for each matrix, in PyTorch and in Megatron: a moving average of its gradients."""

NOT_TRAINED = (
    *(".e_score_correction_bias", ".expert_bias", ".ffn.gate.bias", ".tid2eid"),
    *(".layer_scalar", ".lerope.alpha", ".rotary_emb.alpha"),
    *(".unused_linear_k.weight", ".unused_linear_v.weight", ".unused_k_norm.weight", ".unused_post_layernorm.weight"),
    *(".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets"),
    *(".act_fn.beta", ".act_fn.eps", ".activation_func.beta", ".activation_func.eps"),
)
"""Ends of the names, in both layouts, of parameters without optimizer state: a router's bias (a rule changes it) and
table of experts; the factor of a layer of Gemma 4; those of angles in LeRoPE; parameters that nothing reads; numbers
that hash n-grams; xIELU's two settings."""


def state_name(kind: str, parameter: str) -> str:
    """The name of what an optimizer keeps of a parameter."""
    return f"{STATE}{kind}.{parameter}"


def kind_and_parameter(name: str) -> tuple[str, str]:
    """The inverse of `state_name`; of a tensor of the model itself the kind is empty."""
    kind, _, parameter = name.removeprefix(STATE).partition(".")
    return (kind, parameter) if name.startswith(STATE) else ("", name)


def muon_takes(name: str, dimensions: int) -> bool:
    """Whether Megatron's Muon trains a parameter of this name in Megatron's layout: any matrix but embedding and output
    layer (megatron/core/optimizer/muon.py, get_megatron_muon_optimizer). Adam trains all others."""
    return dimensions == 2 and name not in (EMBEDDING, OUTPUT)


def kinds_of(name: str, dimensions: int, *, muon: bool) -> tuple[Kind, ...]:
    """What a checkpoint keeps of a parameter of this name in Megatron's layout, after Adam alone or with `muon`."""
    return ("param", MOMENTUM) if muon and muon_takes(name, dimensions) else KINDS


def weights_and_states(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Parameters, and what an optimizer keeps of them."""
    weights, states = dict[str, TensorSpec](), dict[str, TensorSpec]()
    for name, spec in specs.items():
        (states if name.startswith(STATE) else weights)[name] = spec
    return weights, states
