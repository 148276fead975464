"""Megatron-Bridge: lines for a recipe, on its ConfigContainer `cfg` (training/config.py, mixed_precision.py)."""

from precisionctl.checkpoints.megatron.provider import RENAMED
from precisionctl.launch.base import Launch, LaunchSource, left_to_provider
from precisionctl.megatron_flags import PARALLEL_SIZES

_MIXED = "megatron.bridge.training.mixed_precision"


def launch(source: LaunchSource) -> Launch:
    """The lines of a recipe. Raises CheckpointError for a checkpoint that is not Megatron's, and UnknownArchitecture
    for a model that neither Megatron-Core nor a provider of Bridge computes, and PrecisionError as
    `require_fp8_sizes`."""
    source.require_megatron(
        "Megatron-Bridge", "Write one with `convert --to megatron`, or let Bridge import the Hugging Face directory."
    )
    source.require_fp8_sizes("Megatron-Bridge")
    of_its_provider = left_to_provider(source.model)
    recipe = "bf16_with_fp8_delayed_scaling_mixed" if source.state else "bf16_mixed"
    lines = [
        f"from {_MIXED} import {recipe}",
        f"cfg.checkpoint.pretrained_checkpoint = {str(source.directory)!r}",
        "cfg.checkpoint.finetune = True",
        "cfg.checkpoint.load_optim = False",
        "cfg.checkpoint.load_rng = False",
        *(["cfg.checkpoint.dist_ckpt_strictness = 'log_all'"] if source.lacks_extra_state else []),
    ]
    sizes = source.sizes(argument for _, argument in PARALLEL_SIZES.values())
    lines += [f"cfg.model.{RENAMED.get(name, name)} = {size}" for name, size in sizes.items()]
    if source.reader.model.mtp_num_layers and not source.model.mtp_num_layers:
        lines.append("cfg.model.mtp_num_layers = None")  # a provider made from config.json would build them
    lines += [f"cfg.model.seq_length = {source.model.max_position_embeddings}"]
    if source.tokenizer:
        lines += [
            "cfg.tokenizer.tokenizer_type = 'HuggingFaceTokenizer'",
            f"cfg.tokenizer.tokenizer_model = {str(source.tokenizer)!r}",
        ]
    lines.append(f"cfg.mixed_precision = {recipe}()")
    if words := source.fp8_words:
        lines += [f"cfg.mixed_precision.{name} = {value!r}" for name, value in words.items()]
        lines.append(f"cfg.mixed_precision.{'fp4' if 'fp4' in words else 'fp8'}_param_gather = False")
    notes = ["weights alone are taken: Bridge's optimizer has files of its own", *source.fp8_notes(source.gemms)]
    if source.state:
        notes.append("whether FP8 state is taken up depends on Bridge's version; its import and export drop it")
    if of_its_provider:
        notes.append(
            f"run_config.yaml describes a model without {', '.join(of_its_provider)}: take the provider of its family, "
            "from AutoBridge"
        )
    elif not (source.directory / "run_config.yaml").is_file():
        notes.append("no run_config.yaml describes the model: take the provider of its family, from AutoBridge")
    return Launch(
        "megatron-bridge",
        environment=source.environment,
        config="\n".join(lines),
        yours=("the recipe of the model's family", "data", "batch sizes", "learning rate"),
        notes=tuple(notes),
    )
