"""Where OLMo-core has the tensors that Hugging Face's names stand for: weights and moments.

A step is a directory `stepN` with a DCP in `model_and_optim`, beside the config.json of the run, which is none of
Hugging Face's.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from precisionctl.checkpoints.chunks import Box, Chunked, ComputedTensor
from precisionctl.checkpoints.computed_rows import FoldedRows, SomeRows, TransposedRows
from precisionctl.checkpoints.other_trainers.name_patterns import pattern_of, with_numbers
from precisionctl.checkpoints.other_trainers.olmo_core_families import (
    DECAY,
    DELTA_NET,
    EXPERTS,
    LAYER,
    ROUTER,
    VOCABULARY,
)
from precisionctl.errors import CheckpointError, DamagedCheckpoint, shown
from precisionctl.model.model_parts import MoE
from precisionctl.model.model_shape import ModelShape
from precisionctl.paths import above, own_name
from precisionctl.sizes import listed
from precisionctl.untrusted.safe_files import has_file, read_json
from precisionctl.untrusted.safe_json import mapping_or_empty
from precisionctl.untrusted.safe_pickle import is_count

DIRECTORY = "model_and_optim"
"""Where OLMo-core has model and optimizer, in the directory of a step."""

_PADDED_TO = 128
"""What its scripts round the rows of a vocabulary up to a multiple of (TokenizerConfig.padded_vocab_size)."""

_WHOSE_CONFIG = "Does the config belong to this checkpoint?"


def check_config(model: ModelShape, directory: Path) -> None:
    """Raise DamagedCheckpoint where the run's config.json, above the `directory` of model and optimizer, says otherwise
    than the model. Only what is there is compared, as ai2-olmo-core 3.0.0 has it, and 2 before it (`attention`)."""
    path = above(directory) / "config.json"
    if own_name(directory) != DIRECTORY or not has_file(path, above(directory)):
        return
    config = read_json(path, above(directory))
    of_model = mapping_or_empty(config.get("model"))
    block_of_all, overrides = (mapping_or_empty(of_model.get(key)) for key in ("block", "block_overrides"))
    by_name = {} if block_of_all.keys() & {"attention", "sequence_mixer"} else block_of_all  # of several kinds

    found = dict[str, tuple[object, object]]()
    for block in map(mapping_or_empty, (block_of_all, *by_name.values(), *overrides.values())):
        attention, norm = (mapping_or_empty(block.get(key)) for key in ("attention", "layer_norm"))
        mixer = mapping_or_empty(block.get("sequence_mixer"))
        attention = attention or (mixer if mixer.get("type") == "attention" else {})
        heads, size = attention.get("n_heads"), attention.get("head_dim")
        groups = heads if attention.get("n_kv_heads") is None else attention["n_kv_heads"]
        router = mapping_or_empty(mapping_or_empty(block.get("feed_forward_moe")).get("router"))
        for key, its, ours in (
            ("n_heads", heads, model.num_attention_heads),
            ("n_kv_heads", groups, model.num_query_groups),
            ("head_dim", size, model.kv_channels),
            ("theta", mapping_or_empty(attention.get("rope")).get("theta"), model.rotary_base),
            ("eps", norm.get("eps"), model.norm_epsilon),
            ("top_k", router.get("top_k"), model.moe.topk if model.moe else None),
        ):
            if its is not None and its != ours:
                found.setdefault(key, (its, ours))
    tokens = mapping_or_empty(mapping_or_empty(config.get("dataset")).get("tokenizer")).get("vocab_size")
    if is_count(tokens) and tokens > model.vocab_size:
        found["vocab_size"] = tokens, model.vocab_size
    if found:
        differing = (f"{key} is {shown(its)} ({shown(ours)} by the reference)" for key, (its, ours) in found.items())
        raise DamagedCheckpoint(listed(differing), where=path, do="Is the reference of this model?")


def placed(
    stored: Chunked, names: Mapping[str, str], family: Mapping[str, str], model: ModelShape, where: Path
) -> Iterator[tuple[str, str, str | ComputedTensor]]:
    """Each tensor, with its name in Hugging Face (of a stack one for each expert), and the stored tensor that it is, or
    its rows in one. `names` are OLMo-core's names of stored tensors; any that the family has not stay as they are. Rows
    that pad the vocabulary are left out. Raises DamagedCheckpoint for more rows than pad a vocabulary, and for experts
    of other sizes than the model's; CheckpointError for square ones."""
    patterns = {olmo: pattern_of(olmo) for olmo in names}
    delta_nets = {numbers[0] for pattern, numbers in patterns.values() if pattern == DECAY}
    for olmo, name in names.items():
        pattern, numbers = patterns[olmo]
        module, _, kind = pattern.rpartition(".")
        modules = DELTA_NET if numbers and numbers[0] in delta_nets else family
        rows = stored.specs[name].rows
        if module in modules:
            padded = module in VOCABULARY and rows > model.vocab_size
            if padded and rows - model.vocab_size >= _PADDED_TO:
                what = f"`{olmo}` has {rows} rows, and by the config there are {model.vocab_size} tokens"
                why = f": more than pad them to a multiple of {_PADDED_TO}"
                raise DamagedCheckpoint(what + why, where=where, do=_WHOSE_CONFIG)
            place = SomeRows(stored, name, 0, model.vocab_size) if padded else name
            yield olmo, with_numbers(f"{modules[module]}.{kind}", numbers), place
        elif pattern == ROUTER and rows % model.hidden_size == 0:
            router = FoldedRows(stored, name, model.hidden_size)
            yield olmo, with_numbers(f"{LAYER}mlp.gate.weight", numbers), router
        elif (linear := EXPERTS.get(pattern)) and model.moe:
            experts = _experts(stored, olmo, name, model.hidden_size, model.moe, where)
            for expert, matrix in enumerate(experts):
                yield olmo, with_numbers(linear, [*numbers, str(expert)]), matrix
        else:
            yield olmo, olmo, name


def _experts(stored: Chunked, olmo: str, name: str, hidden: int, moe: MoE, where: Path) -> Sequence[ComputedTensor]:
    """The matrices of the experts, one below the other: `[in, out]`, or `[out, in]` of gate and up where no tokens are
    dropped (`MoEType.dropless`)."""
    shape, size, down = stored.specs[name].shape, moe.ffn_hidden_size, olmo.endswith(".w2")
    rows = size if down or shape[-1:] == (hidden,) else hidden
    if shape != (moe.num_experts * rows, hidden if rows == size else size):
        what = f"`{olmo}` is {list(shape)}, and by the config its {moe.num_experts} experts are {hidden} by {size}"
        raise DamagedCheckpoint(what, where=where, do=_WHOSE_CONFIG)
    if hidden == size and not down:
        what = f"`{olmo}` has square matrices, which experts that drop tokens have transposed, and others have not"
        raise CheckpointError(what, where=where, do="Convert it with OLMo-core, whose config says which these are.")
    starts = range(0, shape[0], rows)
    if rows == size and not down:
        return [SomeRows(stored, name, start, rows) for start in starts]
    return [TransposedRows(stored, name, Box(start, rows, 0, shape[1])) for start in starts]
