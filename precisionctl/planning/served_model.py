"""How inference engines divide a model among GPUs, by its family's table.

Engines cut a linear as Megatron does, so `Row.cut` says how. That was read in vLLM 0.33 and SGLang 0.5.23, of the
class that serves each family here: which attributes are ColumnParallelLinear, MergedColumnParallelLinear and
QKVParallelLinear (outputs), RowParallelLinear (inputs), or ReplicatedLinear. What they cut otherwise is said here.
"""

from collections.abc import Iterator, Mapping, Sequence

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import Row, filled
from precisionctl.architectures.read_off import TensorRow
from precisionctl.architectures.rearrangements import BY_HEAD, SAME, Transposed
from precisionctl.engines.serving import WHOLE, Cut, HeadCounts, Part, ServingLayout
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import MIXER_PARTS, TensorSpec, is_slice

_OUTPUT_GROUPS = ".linear_o_group_proj"
"""DeepSeek-V4's projection of each group of heads: whole on Megatron's ranks, while engines cut it by groups (wo_a in
vLLM's and SGLang's classes)."""

_INDEXER, _INDEX_QUERIES = ".indexer.", ".indexer.linear_q.weight"
"""MiniMax-M3's, whose heads engines deal out as they do key-value heads: where there are fewer than GPUs, several have
the same (SGLang's MiniMaxM3Attention; vLLM's MinimaxM3QKVParallelLinearWithIndexer, which wants as many of both)."""

_BEFORE_PREDICTION = (".eh_proj.weight", ".e_proj.weight", ".h_proj.weight")
"""What gives a layer of multi-token prediction its input: cut on Megatron's ranks, while engines' GPUs have all of it.
"""


def served(model: ModelShape, stored: Mapping[str, TensorSpec], ranks: int, *, expert_parallel: bool) -> ServingLayout:
    """How a model, of which these Hugging Face tensors are `stored`, is laid out on this many GPUs, with experts whole
    if `expert_parallel`."""
    if isinstance(model, UntabledModel):
        return ServingLayout.of(model.config, ranks, expert_parallel=expert_parallel)
    cuts: dict[str, Cut] = {}
    for row in table_of(model).spelled(stored, model):
        # A config.json may claim more layers than there are tensors
        if 0 < row.count(model) <= len(stored) and row.present.in_layout("hf", model):
            here = [*zip(row.source.hf, _cuts(row.source, model), strict=False)]
            for place in row.places(model):
                cuts |= {filled(name, place): cut for name, cut in here if name not in row.source.values}
    return ServingLayout((*_heads(model),), ranks, model.architecture, expert_parallel, cuts)


def _heads(model: ModelShape) -> Iterator[HeadCounts]:
    for attention in model.attentions:
        yield HeadCounts(attention.num_attention_heads, attention.num_query_groups)
    if model.gdn:
        yield HeadCounts(model.gdn.num_key_heads, model.gdn.num_key_heads, "key heads of delta nets")
    if model.mamba:
        yield HeadCounts(model.mamba.num_heads, model.mamba.num_heads, "heads of mixers")
        if model.mamba.num_groups > 1:  # one group is copied to every GPU
            yield HeadCounts(model.mamba.num_groups, model.mamba.num_groups, "groups of mixers")
    if model.msa and model.msa.n_heads != model.num_query_groups:
        yield HeadCounts(model.num_attention_heads, model.msa.n_heads, "heads, as indexers group them,")
    if model.csa:
        yield HeadCounts(model.csa.o_groups, model.csa.o_groups, "groups of output projections")


def _cuts(row: Row, model: ModelShape) -> Sequence[Cut]:
    """How engines cut each Hugging Face tensor of a row; empty where that is not known. Of linears that no recipe
    computes in FP8, such as routers, it is known only for those that released models store as codes."""
    parallel, of_gemm = row.cut(model), row.gemm or row.only_exported
    if isinstance(row, TensorRow):  # of a wrapper's tower
        return []
    if is_slice(row.hf[0]):  # MXFP4 experts in one tensor, of which vLLM rounds shares up (models/gpt_oss.py)
        return []
    if row.megatron.endswith(_OUTPUT_GROUPS):
        return [Cut("outputs")]
    if row.megatron.endswith(_INDEX_QUERIES) and of_gemm and model.msa:
        return [Cut("outputs", (Part(1, model.msa.n_heads),))]
    if not of_gemm:
        whole = row.megatron.endswith(_BEFORE_PREDICTION) or _INDEXER in row.megatron
        return [WHOLE] if whole else []
    if parallel.kind == "replicated":
        return [WHOLE] * len(row.hf)
    transposed = isinstance(row.rearrangement, Transposed)
    if parallel.kind == "columns":
        return [Cut("inputs", transposed=transposed)]
    sizes = [shape[transposed] for shape in row.shapes(model, "hf")]
    of_qkv = row.sizes[0] == "qkv_size"
    by_head = of_qkv and row.rearrangement == SAME and model.num_query_groups == model.num_attention_heads
    if by_head or row.rearrangement == BY_HEAD:  # all that belongs to a head stands together
        return [Cut("outputs")] * len(sizes)
    if of_qkv:
        parts = _parts_of_qkv(row, model, sizes)
    else:
        parts = [Part(rows) for rows in parallel.rows_of_parts(row.shape(model)[0])]
    # What projects into a Mamba-2 mixer of one group, which every GPU gets
    by_row = parallel.names == MIXER_PARTS and model.mamba is not None and model.mamba.num_groups == 1
    if by_row:
        gates, inputs, *of_group, steps = parts
        parts = [gates, inputs, *(Part(part.size, 1) for part in of_group), steps]

    cuts, left = [], iter(parts)
    for size in sizes:
        own: list[Part] = []  # the parts that are in this tensor
        while sum(part.size for part in own) < size:
            part = next(left, None)
            assert part is not None, "tensors of a row have the rows of all its parts"
            own.append(part)
        cuts.append(Cut("outputs", tuple(own), transposed, by_row))
    return cuts


def _parts_of_qkv(row: Row, model: ModelShape, sizes: Sequence[int]) -> list[Part]:
    """Queries, with gates if these are a tensor of their own; keys; values, if they are others; gates of heads."""
    attention = row.in_its_layers(model)
    gates = [Part(sizes[-1])] if attention.head_wise_attn_gate else []
    sizes = sizes[: len(sizes) - len(gates)]
    groups = attention.num_query_groups
    channels = [attention.kv_channels, *([] if attention.keys_are_values else [attention.value_channels])]
    keys = [Part(groups * each, groups) for each in channels]
    queries = sizes[: -len(keys)] or [sizes[0] - sum(part.size for part in keys)]
    return [*map(Part, queries), *keys, *gates]
