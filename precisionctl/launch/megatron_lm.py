"""Megatron-LM: flags of `pretrain_gpt.py`, under the names that versions from 0.14 on have in common (arguments.py)."""

import shlex
from collections.abc import Mapping, Sequence, Set
from typing import Any

from precisionctl.architectures.megatron.expert_args import CAPACITY
from precisionctl.architectures.megatron.heterogeneous_args import OF_LAYERS
from precisionctl.architectures.megatron.megatron_args import (
    otherwise_in_megatron,
    read_megatron_args,
    to_megatron_args,
)
from precisionctl.checkpoints.megatron.arguments import read_muon_args
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.errors import DamagedCheckpoint, RecipeError, UnknownArchitecture
from precisionctl.launch.base import Launch, LaunchSource, left_to_provider
from precisionctl.megatron_flags import PARALLEL_SIZES, flags_of
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.param import Parallelism
from precisionctl.recipe import MUON_KEYS, Optimizer, RouterSettings, recipe_of
from precisionctl.trainer.optimizer.megatron_schedule import DECAY_STYLES, WSD_STYLES
from precisionctl.trainer.saved.balance import balance_of

Option = tuple[str, ...]

_VALUES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("max_position_embeddings", "seq_length", "normalization", "norm_epsilon", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "rope_scaling_factor", "rotary_seq_len_interpolation_factor", "rope_type"),
    *("window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_type", "attention_dropout", "hidden_dropout"),
    *("make_vocab_size_divisible_by", "padded_vocab_size", "glu_linear_offset", "activation_func_clamp_value"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim", "num_experts", "moe_layer_freq", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_score_function"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    *("moe_token_dispatcher_type", "mtp_num_layers", "experimental_attention_variant", "linear_attention_freq"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_k_norm_epsilon"),
    *OF_LAYERS,
)
_SWITCHES = (
    *("group_query_attention", "swiglu", "squared_relu", "quick_geglu", "add_qkv_bias", "qk_layernorm"),
    *("rotary_interleaved", "apply_layernorm_1p", "untie_embeddings_and_output_weights", "use_rope_scaling"),
    *("multi_latent_attention", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_grouped_gemm"),
    *("moe_shared_expert_gate", "attention_output_gate", "dsa_indexer_rope_interleaved"),
    "use_rotary_position_embeddings",
)
_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
}
"""Arguments that are on by default, each with the flag that turns it off."""

_YOURS = ("--micro-batch-size", "--global-batch-size", "--train-iters", "--lr", "--data-path", "--save")

_DROPPING = "moe_token_drop_policy"
_BALANCE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_BALANCE_KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def launch(source: LaunchSource) -> Launch:
    """The flags of `pretrain_gpt.py`. Raises CheckpointError for a checkpoint that is not Megatron's,
    UnknownArchitecture for a model that flags cannot describe, and PrecisionError as `require_fp8_sizes`."""
    source.require_megatron("Megatron-LM", f"Write one: {source.conversion('megatron')}")
    source.require_fp8_sizes("Megatron-LM")
    sizes = source.sizes(argument for _, argument in PARALLEL_SIZES.values())
    parallel = Parallelism(**{field: sizes[name] for field, (_, name) in PARALLEL_SIZES.items() if name in sizes})
    options = [*_model_options(source.model), *_loading_options(source)]
    if source.tokenizer:
        options += [("--tokenizer-type", "HuggingFaceTokenizer"), ("--tokenizer-model", str(source.tokenizer))]
    options += [("--bf16",), *flags_of(source.fp8_words)]
    pooled_loss = balance_of(source.reader, RouterSettings()).pooled_loss
    training = _training_options(source, pooled_loss)
    options += training
    muon = _muon_options(source)
    options += muon
    if source.recipe and source.recipe.optimizer.preset == "fp8-lm":  # kept as nearly as Megatron's own optimizer can
        dtypes = {"main_grads": "bf16", "main_params": "fp16", "exp_avg": "fp8", "exp_avg_sq": "fp16"}
        options += [("--use-distributed-optimizer",), ("--use-precision-aware-optimizer",)]
        options += [(_flag(f"{name}_dtype"), dtype) for name, dtype in dtypes.items()]
    if sizes.pop("virtual_pipeline_model_parallel_size", 1) > 1:  # which has no flag of its own
        by_layers = source.sizes(["num_layers_per_virtual_pipeline_stage"])  # where all stages have as many
        sizes |= by_layers or {"num_virtual_stages_per_pipeline_rank": parallel.virtual}
    options += [(_flag(name), str(size)) for name, size in sizes.items()]
    if source.model.moe and parallel.tensor > 1:
        options.append(("--sequence-parallel",))  # Megatron requires it for experts under tensor parallelism
    notes = ["--seq-length is the model's longest; a shorter one is fine"]
    steps = dict(option for option in training if len(option) == 2).get("--train-iters")
    if steps and int(steps) <= (source.reader.iteration or 0):
        notes.append(f"the run has reached its last iteration, {steps}: a larger --train-iters lets it go on")
    if source.tokenizer is None:
        notes.append("no tokenizer lies beside the weights: --tokenizer-type and --tokenizer-model are yours, too")
    if pooled_loss:
        notes.append(
            f"Megatron has no loss of the loads of all layers together, as router.pooled_loss {pooled_loss:g} is: "
            "--moe-router-load-balancing-type aux_loss is that of each layer"
        )
    notes += source.fp8_notes(source.gemms)
    if source.recipe and source.recipe.optimizer.preset == "fp8-lm":
        notes.append("masters and moments are kept as fp8-lm keeps them; gradients are BF16, and go between ranks so")
    notes += _muon_notes(muon)
    if source.state:
        notes.append(
            "to go on in BF16, leave the --fp8 flags out, and convert with --precision bf16 so that no pickle is met"
        )
    elif source.reader.fp8:
        notes.append("FP8 state is in the sidecar alone: for an FP8 run, convert with --precision fp8")
    if source.lacks_schedule:
        path = shlex.quote(str(source.path))
        notes.append(
            "Megatron-LM loads an optimizer only with a schedule of learning rates, which this checkpoint lacks: "
            f"continue from a step of `precisionctl resume {path} --precision bf16`, which adds one "
            "(docs/deepspeed_to_megatron.md); or give --no-load-optim, and lose the optimizer"
        )
    if source.lacks_extra_state:
        notes.append("no _extra_state is in it; --dist-ckpt-strictness lets Megatron load it and name what is missing")
    return Launch(
        "megatron-lm",
        ("torchrun", "--nproc-per-node", str(parallel.ranks), "pretrain_gpt.py"),
        tuple(options),
        source.environment,
        yours=_still_yours(source.model, {option[0] for option in training}),
        notes=tuple(notes),
    )


def _still_yours(model: ModelShape, given: Set[str]) -> tuple[str, ...]:
    """The flags that are not `given`: the length of a run is given in iterations or in samples, and without a word on
    it Megatron keeps no experts in balance."""
    counted = given | ({"--train-iters"} if "--train-samples" in given else set())
    wanted = (*_YOURS, *(map(_flag, _BALANCE) if model.moe else ()))
    return tuple(flag for flag in wanted if flag not in counted)


def has_flags(model: ModelShape) -> bool:
    """Whether flags describe a model: `launch` refuses others."""
    try:
        _model_options(model)
    except UnknownArchitecture:
        return False
    return True


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _model_options(model: ModelShape) -> list[Option]:
    """The flags that describe a model. They are read back and must give the same model, since flags that silently
    describe another one would be worse than none; raises UnknownArchitecture if they do not."""
    arguments = to_megatron_args(model)
    given = {name: arguments[name] for name in _VALUES if arguments.get(name) is not None}
    given |= {name: True for name in _SWITCHES if arguments.get(name)}
    given |= {name: False for name in _OFF if arguments.get(name) is False}
    if model.num_query_groups == model.num_attention_heads:
        given.pop("num_query_groups")
    if not given.get("use_rope_scaling"):
        given.pop("rope_scaling_factor", None)
    try:
        understood = read_megatron_args({"q_lora_rank": None, **given}, model.padded_vocab_size, "")
    except (DamagedCheckpoint, UnknownArchitecture) as error:
        raise UnknownArchitecture(
            f"no flags are known here that tell Megatron-LM all of `{model.architecture}`",
            do="Megatron-Bridge takes the provider of its family: --framework megatron-bridge.",
        ) from error
    if missing := differences(model, understood) | otherwise_in_megatron(model):
        left_to_provider(model)
        raise UnknownArchitecture(
            f"Megatron-LM has no flags for all of `{model.architecture}`: {', '.join(missing)}",
            do="Megatron-Bridge goes by what is described beside the weights: --framework megatron-bridge.",
        )
    # The flags' own readers take tuples and lists without spaces
    options: list[Option] = [(_flag(name), str(given[name]).replace(" ", "")) for name in _VALUES if name in given]
    options += [(_flag(name),) for name in _SWITCHES if name in given]
    return options + [(flag,) for name, flag in _OFF.items() if name in given]


def _loading_options(source: LaunchSource) -> list[Option]:
    options: list[Option] = [("--load", str(source.root)), ("--ckpt-format", source.reader.container)]
    if (step := source.ckpt_step()) is not None:
        options.append(("--ckpt-step", str(step)))
    if not source.has_optimizer:
        options += [("--no-load-optim",), ("--no-load-rng",)]
    elif not source.has_generators:
        options.append(("--no-load-rng",))
    if source.lacks_extra_state:
        options.append(("--dist-ckpt-strictness", "log_all"))
    return options


def _training_options(source: LaunchSource, pooled_loss: float) -> list[Option]:
    """The flags with which Megatron goes on with the checkpoint's schedule, batches and length, and with its balance of
    experts, but for a `pooled_loss`. Rates are printed as Python prints floats: since core 0.17 Megatron knows a group
    of parameters by them."""
    if not source.has_optimizer:
        return []
    scheduler, args = source.scheduler, source.reader.args if of_megatron(source.reader) else {}
    words = {"lr": scheduler.get("max_lr"), "min_lr": scheduler.get("min_lr")}
    words |= {name: args.get(name) for name in ("clip_grad", "lr_warmup_init")}
    found: dict[str, object] = {name: value for name, value in words.items() if isinstance(value, int | float)}
    if found.get("lr_warmup_init") == 0:  # Megatron's default
        del found["lr_warmup_init"]
    if (style := scheduler.get("lr_decay_style")) in DECAY_STYLES:
        found |= {"lr_decay_style": style}
    length = source.sizes(["train_samples"]) or source.sizes(["train_iters"])  # a run in samples has both in its args
    if style == "WSD" and args.get("lr_wsd_decay_style") in WSD_STYLES:
        decay = "lr_wsd_decay_samples" if "train_samples" in length else "lr_wsd_decay_iters"
        found |= {"lr_wsd_decay_style": args["lr_wsd_decay_style"], **source.sizes([decay])}
    found |= source.sizes(["micro_batch_size", "global_batch_size"]) | length
    options: list[Option] = [(_flag(name), str(value)) for name, value in found.items()]
    options += _balance_options(args, pooled_loss) if source.model.moe else []
    return [*options, ("--use-checkpoint-opt_param-scheduler",)] if scheduler else options


def _muon_options(source: LaunchSource) -> list[Option]:
    """The flags with which Megatron goes on with Muon. Its momentum's share is in the checkpoint's groups, too, the
    others are not."""
    args = source.reader.args if of_megatron(source.reader) else {}
    if not source.has_optimizer or args.get("optimizer") != "muon":
        return []
    options: list[Option] = [("--optimizer", "muon")]
    for key, said in read_muon_args(args).items():
        if key not in MUON_KEYS:
            continue
        if _flag(key) == _STEPS and type(said) is int and said > 0:
            value = said  # a recipe has no more than 99
        else:
            try:
                value = getattr(recipe_of({f"optimizer.{key}": said}, source.path).optimizer, key)
            except RecipeError:  # a value that no recipe has, as a file may say anything
                continue
        flag, is_default = _MUON_SWITCHES.get(key, _flag(key)), value == getattr(Optimizer(), key)
        if key in _MUON_SWITCHES:  # of a switch there is no flag for the default
            options += [] if is_default else [(flag,)]
        elif not (is_default and flag in _MUON_CHANGED):  # not in all versions
            options.append((flag, str(value)))
    if (mode := args.get("muon_tp_mode")) in _MUON_TP_MODES:
        options.append(("--muon-tp-mode", mode))
    return options


def _muon_notes(options: Sequence[Option]) -> list[str]:
    """What not all versions take of Muon's flags."""
    given = {option[0]: option[-1] for option in options}
    notes = [f"{flag} {said}" for flag, said in _MUON_CHANGED.items() if flag in given]
    steps = given.get(_STEPS, "")
    if _COEFFICIENTS not in given and steps.isdecimal() and int(steps) % 5:  # muon_utils.py: newton_schulz
        notes.append(
            f"{_STEPS} {steps} is no multiple of 5, as many sets of coefficients as Muon takes in turn: "
            "emerging_optimizers 0.1.0 refuses it at the first update, 0.4.0 takes it"
        )
    return notes


_NESTEROV, _STEPS, _COEFFICIENTS = "--muon-use-nesterov", "--muon-num-ns-steps", "--muon-coefficient-type"
_MUON_SWITCHES = {"muon_nesterov": _NESTEROV, "muon_split_qkv": "--muon-no-split-qkv"}
"""Each with the flag for what is not its default."""
_MUON_TP_MODES = ("blockwise", "duplicated", "distributed")
_MUON_CHANGED = {
    _NESTEROV: "is --muon-nesterov from core 0.18 on",
    _COEFFICIENTS: "is there from core 0.17 on: before, Megatron has other coefficients",
}
"""Flags that not all versions of Megatron-LM with Muon have, from 0.16 on."""


def _balance_options(args: Mapping[str, Any], pooled_loss: float) -> list[Option]:
    """The flags for balancing experts, of which some are lists, and for dropping tokens. In place of a `pooled_loss`
    the user chooses another."""
    options: list[Option] = []
    kinds, coefficients = (one if isinstance(one := args.get(name), list) else [one] for name in _BALANCE)
    known = all(kind in _BALANCE_KINDS for kind in kinds) and all(isinstance(one, int | float) for one in coefficients)
    if known and not (pooled_loss and kinds == ["none"]):
        options += [(_flag(_BALANCE[0]), *map(str, kinds)), (_flag(_BALANCE[1]), *map(str, coefficients))]
    for name in ("moe_z_loss_coeff", "moe_router_bias_update_rate", CAPACITY):
        if isinstance(args.get(name), int | float):
            options.append((_flag(name), str(args[name])))
    if args.get(_DROPPING) in ("probs", "position"):
        options.append((_flag(_DROPPING), args[_DROPPING]))
    return options
