"""What other frameworks are started with. Megatron's flags are parsed by Megatron-LM's own, of three versions.

`golden/megatron_flags.json` has those that are used: their destination, type and choices, as the parser of Megatron-LM
core_v0.14.0, core_v0.16.1 and core_v0.19.0 (`add_megatron_arguments`, megatron/training/arguments.py) has them.
"""

import argparse
import ast
import json
import shlex
import shutil
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import deepspeed_files
import pytest
import repository
import torch
import trained_models
import yaml
from click.testing import CliRunner
from conversions import change_args
from pico import ABSENT, LLAMA3_ROPE, make_and_save, save
from soaking import first
from trainer_directories import pytorch
from training import SMALL, make_source, make_text, run, settings
from transformers import AutoTokenizer

from precisionctl.architectures.megatron.megatron_args import to_megatron_args
from precisionctl.calibration.calibrate import Calibration, calibrate
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionError, UnknownArchitecture
from precisionctl.launch import frameworks
from precisionctl.launch.base import Launch, LaunchSource
from precisionctl.launch.frameworks import FRAMEWORKS
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.recipe import MUON_KEYS, Optimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of what megatron-core imports from it
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

FLAGS: dict[str, dict[str, dict[str, Any]]] = json.loads((repository.GOLDEN / "megatron_flags.json").read_text())
READERS: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "tuple_type": lambda text: tuple(int(part) for part in text.strip("()").split(",")),
    "moe_freq_type": lambda text: ast.literal_eval(text),
}
"""What Megatron's types make of a text."""


def launch(checkpoint: Path, framework: str, iteration: int | None = None) -> Launch:
    return frameworks.launch(checkpoint, framework, iteration)


def parse(version: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, about in FLAGS[version].items():
        if about.get("switch"):
            off = flag.startswith(("--disable-", "--no-bias-", "--no-rope-", "--muon-no-"))
            parser.add_argument(flag, dest=about["dest"], action="store_false" if off else "store_true")
        else:
            kind = READERS[about.get("type", "str")]
            parser.add_argument(
                flag, dest=about["dest"], type=kind, nargs=about.get("nargs"), choices=about.get("choices")
            )
    return parser.parse_args(words)


def flags_of(found: Launch) -> list[str]:
    return [word for option in found.options for word in option]


def converted(folder: Path, family: str = "llama-3", *, name: str = "", **changes: Any) -> Path:
    save(folder / "source", family)
    execute(plan_command(Request(folder / "source", folder / (name or "megatron"), "megatron", **changes)))
    return folder / (name or "megatron")


LLAMA_31 = LLAMA3_ROPE | {"factor": 32.0, "original_max_position_embeddings": 8192}
"""As in Llama 3.2 1B; Megatron's flags know this one context, and the factor."""
NEW = {
    **dict.fromkeys(("mistral", "mixtral", "qwen2-window"), ("core_v0.16.1", "core_v0.19.0")),  # windows
    **dict.fromkeys(("deepseek-v3.2", "glm-moe-dsa"), ("core_v0.19.0",)),  # sparse attention
}
"""Versions of Megatron that have the flags of a family, where not all have them."""
SAID = {
    *("llama-2", "llama-all-biases", "llama-head-dim", "mistral", "qwen2", "qwen2-window", "qwen3", "mixtral"),
    *("qwen3-moe", "phi3", "nemotron", "gpt2", "deepseek-v2", "deepseek-v3.2", "glm-moe-dsa"),
    "nemotron-nas",
}
UNSAID = {
    "gpt-oss": "rope_scaling",
    "gemma2": "attn_logit_softcapping",
    "gemma3": "rotary_base_local",
    "phi3-long": "rope_scaling",
}


@pytest.mark.parametrize("family", first(7, sorted(SAID)))
def test_megatron_lm_reads_the_model_of_its_flags(family: str, tmp_path: Path) -> None:
    """Every flag is one of its own with a value that it takes, and where TransformerConfig has a field of that name, it
    has the value that the checkpoint's own arguments say."""
    found = launch(converted(tmp_path, family), "megatron-lm")
    model = open_checkpoint(tmp_path / "megatron").model
    said = to_megatron_args(model)
    known = {field.name for kind in (TransformerConfig, MLATransformerConfig) for field in fields(kind)}
    for version in NEW.get(family, FLAGS):
        read = vars(parse(version, flags_of(found)))
        assert (read["ckpt_format"], read["load"]) == ("torch_dist", str(tmp_path / "megatron"))
        assert read["no_load_optim"] and read["no_load_rng"] and read["bf16"]
        assert read["padded_vocab_size"] == model.padded_vocab_size
        compared = 0
        for name in known & said.keys() & read.keys():
            if read[name] is not None:
                assert read[name] == said[name], name
                compared += 1
        assert compared > 10


@pytest.mark.parametrize("family", sorted(UNSAID))
def test_a_model_that_flags_cannot_say_is_refused_by_what_they_lack(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=UNSAID[family]):
        launch(converted(tmp_path, family), "megatron-lm")


@pytest.mark.parametrize("family", sorted({"deepseek-v4", "ling-3"} - ABSENT.keys()))
def test_a_model_whose_attention_has_no_flags_is_left_to_bridge(tmp_path: Path, family: str) -> None:
    folder = converted(tmp_path, family)
    with pytest.raises(UnknownArchitecture, match="no flags are known here.*--framework megatron-bridge"):
        launch(folder, "megatron-lm")
    assert any("the provider of its family" in note for note in launch(folder, "megatron-bridge").notes)


def test_a_model_of_bridges_own_modules_is_left_to_its_provider(tmp_path: Path) -> None:
    """Megatron-Bridge 0.6 has the factors of Falcon-H1, and mixers without a norm (models/falcon_h1)."""
    folder = converted(tmp_path, "falcon-h1")
    with pytest.raises(UnknownArchitecture, match="multipliers.*--framework megatron-bridge"):
        launch(folder, "megatron-lm")
    assert any("multipliers, mamba.gated_norm: take the provider" in n for n in launch(folder, "megatron-bridge").notes)


def test_latents_keep_their_norms(tmp_path: Path) -> None:
    """megatron-core makes MLA's projections with a norm under qk_layernorm alone (gpt_layer_specs.py); a model without
    would load all the same, and be another one."""
    folder = converted(tmp_path, "deepseek-v2")
    assert any(name.endswith("linear_kv_up_proj.layer_norm_weight") for name in open_checkpoint(folder).specs)
    assert parse("core_v0.16.1", flags_of(launch(folder, "megatron-lm"))).qk_layernorm
    assert yaml.safe_load((folder / "release/run_config.yaml").read_text())["model"]["qk_layernorm"] is True


def test_sizes_container_and_experts_follow_the_checkpoint(tmp_path: Path) -> None:
    cut = converted(tmp_path, "mixtral", container="torch", parallelism=Parallelism(tensor=2, pipeline=2, expert=2))
    found = launch(cut, "megatron-lm")
    read = parse("core_v0.16.1", flags_of(found))
    sizes = (read.tensor_model_parallel_size, read.pipeline_model_parallel_size, read.expert_model_parallel_size)
    assert sizes == (2, 2, 2) and read.ckpt_format == "torch" and read.sequence_parallel
    assert found.command == ("torchrun", "--nproc-per-node", "8", "pretrain_gpt.py")


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [((1, 1, 2, 2), "4"), ((2, 1, 2, 1), "2"), ((2, 1, 2, None), "4"), ((4, 2, 2, 1), "8"), ((1, 1, 1, None), "1")],
)
def test_experts_share_the_ranks_of_attention(tmp_path: Path, sizes: tuple[Any, ...], ranks: str) -> None:
    """By megatron-core: the number of ranks is a multiple of TP * PP and of ETP * EP * PP, where ETP is TP if it is not
    given (initialize_model_parallel, parallel_state.py)."""
    cut = Parallelism(tensor=sizes[0], pipeline=sizes[1], expert=sizes[2], expert_tensor=sizes[3])
    assert launch(converted(tmp_path, "mixtral", parallelism=cut), "megatron-lm").command[2] == ranks


def test_virtual_stages_are_said_by_layers_or_by_number(tmp_path: Path) -> None:
    save(tmp_path / "source", "llama-2", num_hidden_layers=6)
    for name, cut, by_layers, by_number in (
        ("even", Parallelism(pipeline=3, virtual=2), 1, None),
        ("uneven", Parallelism(pipeline=2, virtual=2, last_layers=2), None, 2),
    ):
        request = Request(tmp_path / "source", tmp_path / name, "megatron", parallelism=cut)
        execute(plan_command(request))
        read = parse("core_v0.16.1", flags_of(launch(tmp_path / name, "megatron-lm")))
        found = read.num_layers_per_virtual_pipeline_stage, read.num_virtual_stages_per_pipeline_rank
        assert found == (by_layers, by_number), name
        given = set_by(launch(tmp_path / name, "megatron-bridge").config)
        assert given["cfg.model.virtual_pipeline_model_parallel_size"] == 2
        assert given.get("cfg.model.num_layers_in_last_pipeline_stage") == cut.last_layers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with a tokenizer, its FP8 state, and both in Megatron's layout and back."""
    folder = tmp_path_factory.mktemp("launch")
    make_source(folder / "source", family="llama-2", rope_parameters=LLAMA_31)
    make_text(folder / "text")
    keys = tuple(f"{key}={value}" for key, value in SMALL.items())
    state = folder / "state"
    calibrate(Calibration(folder / "source", folder / "text", state, overrides=keys, passes=1, backend="emulated"))
    for name, precision in (("fp8", "fp8"), ("bf16", "bf16")):
        made: Any = Request(folder / "source", folder / name, "megatron", precision, fp8_state=state)
        execute(plan_command(made))
    execute(plan_command(Request(folder / "fp8", folder / "hf", "hf")))
    return folder


def test_fp8_state_brings_its_recipe_and_the_switch_for_pickles(place: Path) -> None:
    found = launch(place / "fp8", "megatron-lm")
    read = parse("core_v0.19.0", flags_of(found))
    history, algorithm = read.fp8_amax_history_len, read.fp8_amax_compute_algo
    assert (read.fp8, read.fp8_recipe, read.fp8_margin, history, algorithm) == ("hybrid", "delayed", 0, 4, "max")
    assert found.environment == {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
    assert read.use_rope_scaling and read.rope_scaling_factor == 32
    assert read.tokenizer_type == "HuggingFaceTokenizer" and (Path(read.tokenizer_model) / "tokenizer.json").is_file()
    plain = launch(place / "bf16", "megatron-lm")
    assert not plain.environment and not any("fp8" in word for word in flags_of(plain))
    assert any("sidecar" in note for note in plain.notes)


def test_a_run_of_ours_is_gone_on_from_with_its_optimizer_rates_and_batches(place: Path, tmp_path: Path) -> None:
    changes = {"optimizer__lr": 3e-4, "schedule__min_ratio": 0.8, "schedule__kind": "wsd", "schedule__decay_steps": 1}
    run(settings(place / "source", place / "text", tmp_path / "run", "fp8", train__steps=2, **changes))
    found = launch(tmp_path / "run", "megatron-lm")
    for version in FLAGS:
        read = parse(version, flags_of(found))
        assert not read.no_load_optim and read.no_load_rng and read.load == str(tmp_path / "run")
        assert (read.lr, read.min_lr, read.lr_decay_style) == (3e-4, 0.00024, "WSD")
        assert (read.lr_wsd_decay_style, read.lr_wsd_decay_iters) == ("linear", 1)
        assert read.use_checkpoint_opt_param_scheduler and read.train_iters == 2
    assert found.yours == ("--data-path", "--save")
    assert any("has reached its last iteration, 2" in note for note in found.notes)
    args = TorchDistReader(tmp_path / "run").args
    batch = args["global_batch_size"]
    assert not args["no_save_optim"] and args["no_save_rng"] and args["consumed_train_samples"] == 2 * batch


def test_a_schedule_that_counts_samples_is_gone_on_with_by_the_sample(place: Path, tmp_path: Path) -> None:
    """As Megatron does (get_optimizer_param_scheduler, megatron/training/training.py): a run in iterations heeds no
    decay in samples."""
    run(settings(place / "source", place / "text", tmp_path / "run", train__steps=1, schedule__kind="wsd"))
    words = {"lr_wsd_decay_iters": None, "lr_wsd_decay_samples": 6, "train_samples": 90, "lr_warmup_init": 1e-6}
    change_args(tmp_path / "run" / "iter_0000001", **words)
    found = launch(tmp_path / "run", "megatron-lm")
    assert found.yours == ("--data-path", "--save") and not any("has reached" in note for note in found.notes)
    for version in FLAGS:
        read = parse(version, flags_of(found))
        assert (read.lr_wsd_decay_samples, read.lr_wsd_decay_iters) == (6, None)
        assert (read.train_samples, read.train_iters, read.lr_warmup_init) == (90, None, 1e-6)
    change_args(tmp_path / "run" / "iter_0000001", lr_warmup_init=torch.ones(2))  # a stranger's
    assert "--lr-warmup-init" not in flags_of(launch(tmp_path / "run", "megatron-lm"))


def test_megatron_is_told_the_iteration_where_its_tracker_names_another(place: Path, tmp_path: Path) -> None:
    """`_load_base_checkpoint` in megatron/training/checkpointing.py takes the tracker's, else --ckpt-step."""
    made, one, tracker = place / "bf16", tmp_path / "iter_0000001", tmp_path / "latest_checkpointed_iteration.txt"
    for number in (1, 12):
        shutil.copytree(made / "release", tmp_path / f"iter_{number:07d}")
    tracker.write_text("12")

    def told(path: Path, iteration: int | None = None) -> list[int | None]:
        flags = flags_of(launch(path, "megatron-lm", iteration))
        read = [parse(version, flags) for version in FLAGS]
        assert all(each.load == str(tmp_path) for each in read)
        return sorted({each.ckpt_step for each in read})

    assert told(tmp_path) == told(tmp_path, 12) == told(tmp_path / "iter_0000012") == [None]
    assert told(tmp_path, 1) == told(one) == [1]
    tracker.unlink()  # without it Megatron would begin with random weights
    assert told(one) == [1]
    for said, message in ("0", "names iter_0000000"), ("last", "says 'last'"), ("release", "names release"):
        tracker.write_text(said)
        with pytest.raises(CheckpointError, match=message) as refused:
            launch(one, "megatron-lm")
        assert "`1`" in str(refused.value.do)
    shutil.copytree(made / "release", tmp_path / "release")
    assert launch(tmp_path, "megatron-lm")
    tracker.write_text("12")
    with pytest.raises(CheckpointError, match="names iter_0000012"):
        launch(tmp_path / "release", "megatron-lm")
    tracker.write_text("0")  # of which Megatron says `error parsing metadata file`
    for name, before in ("best", "release"), ("iter_0000000", "best"):
        (tmp_path / before).rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"does not load {name}, but") as refused:
            launch(tmp_path / name, "megatron-lm")
        assert f"{name} NEW --to megatron" in str(refused.value.do)
    execute(plan_command(Request(tmp_path / "iter_0000000", tmp_path / "new", "megatron")))
    assert launch(tmp_path / "new", "megatron-lm")


def test_what_balances_experts_in_a_run_of_ours_balances_them_in_megatron(place: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family="qwen3-moe", mlp_only_layers=[])
    keys = {"router__pooled_loss": 0, "router__aux_loss": 0.01, "router__z_loss": 0.001}
    run(settings(source, place / "text", tmp_path / "one", train__steps=1, **keys))
    run(settings(source, place / "text", tmp_path / "two", train__steps=1, router__seq_aux_loss=0.02, **keys))
    for version in FLAGS:
        one, two = (parse(version, flags_of(launch(tmp_path / name, "megatron-lm"))) for name in ("one", "two"))
        assert one.moe_router_load_balancing_type == ["aux_loss"] and one.moe_aux_loss_coeff == [0.01]
        assert two.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
        assert two.moe_aux_loss_coeff == [0.01, 0.02] and two.moe_z_loss_coeff == 0.001


def test_a_balance_that_megatron_has_no_word_for_is_left_to_the_user_with_its_coefficient(
    place: Path, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", family="qwen3-moe", mlp_only_layers=[])
    run(settings(source, place / "text", tmp_path / "run", train__steps=1, router__pooled_loss=0.03))
    balance = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
    found = launch(tmp_path / "run", "megatron-lm")
    assert not {*balance} & {*flags_of(found)} and {*balance} <= {*found.yours}
    assert any("router.pooled_loss 0.03" in note for note in found.notes)
    execute(plan_command(Request(source, tmp_path / "weights", to="megatron")))  # no training says what balances them
    assert {*balance} <= {*launch(tmp_path / "weights", "megatron-lm").yours}
    run(settings(source, place / "text", tmp_path / "off", train__steps=1, router__pooled_loss=0))
    off = launch(tmp_path / "off", "megatron-lm")
    assert "none" in flags_of(off) and not {*balance} & {*off.yours} and "pooled_loss" not in "".join(off.notes)


def test_a_run_that_drops_tokens_goes_on_so(place: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family="qwen3-moe", mlp_only_layers=[])
    run(settings(source, place / "text", tmp_path / "run", train__steps=1))
    words = {"moe_expert_capacity_factor": 1.25, "moe_token_drop_policy": "position"}
    change_args(tmp_path / "run" / "iter_0000001", **words)
    for version in FLAGS:
        read = parse(version, flags_of(launch(tmp_path / "run", "megatron-lm")))
        assert {name: getattr(read, name) for name in words} == words


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # megatron-core's own, of its own default
@pytest.mark.parametrize(
    ("scaling", "word", "fp8"),
    [("current", "tensorwise", "hybrid"), ("block", "blockwise", "e4m3"), ("mxfp8", "mxfp8", "e4m3")],
)
def test_a_run_of_ours_brings_a_recipe_without_state(
    place: Path, tmp_path: Path, scaling: str, word: str, fp8: str
) -> None:
    """The values are those that megatron-core's own config takes."""
    changes: dict[str, Any] = {"precision__scaling": scaling, "train__steps": 1}
    changes |= {"precision__num_layers_at_end_in_bf16": 1, "precision__block__use_f32_scales": True}
    changes |= {"precision__keep_bf16": '["*.linear_proj"]'}
    run(settings(place / "source", place / "text", tmp_path / "run", "fp8", **changes))
    found = launch(tmp_path / "run", "megatron-lm")
    for version in FLAGS:
        read = parse(version, flags_of(found))
        assert (read.fp8, read.fp8_recipe, read.first_last_layers_bf16) == (fp8, word, True)
        assert (read.num_layers_at_start_in_bf16, read.num_layers_at_end_in_bf16) == (0, 1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            **{name: getattr(read, name) for name in ("fp8", "fp8_recipe", "first_last_layers_bf16")},
            num_layers_at_start_in_bf16=0,
        )
        assert config.fp8_recipe == word
    assert ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES" in found.environment) == (scaling == "block")
    assert any("no flag for precision.keep_bf16: *.linear_proj" in note for note in found.notes)
    bridge = launch(tmp_path / "run", "megatron-bridge")
    lines = bridge.config.splitlines()
    assert any("no flag for precision.keep_bf16: *.linear_proj" in note for note in bridge.notes)
    assert f"cfg.mixed_precision.fp8_recipe = {word!r}" in lines
    assert "cfg.mixed_precision.num_layers_at_end_in_bf16 = 1" in lines


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # megatron-core's own, of its own default
def test_a_run_of_ours_in_nvfp4_brings_the_flags_of_fp4(place: Path, tmp_path: Path) -> None:
    """Which Megatron has since core 0.15. The values are those that megatron-core's own config takes."""
    changes: dict[str, Any] = {"train__steps": 1, "precision__num_layers_at_end_in_bf16": 1}
    run(settings(place / "source", place / "text", tmp_path / "run", "nvfp4", **changes))
    found = launch(tmp_path / "run", "megatron-lm")
    assert not any(word.startswith("--fp8") for word in flags_of(found)) and not found.environment
    for version in [*FLAGS][1:]:
        read = parse(version, flags_of(found))
        assert (read.bf16, read.fp4, read.fp4_recipe, read.first_last_layers_bf16) == (True, "e2m1", "nvfp4", True)
        assert (read.num_layers_at_start_in_bf16, read.num_layers_at_end_in_bf16) == (0, 1)
        taken = ("fp4", "fp4_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16")
        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, **{name: getattr(read, name) for name in taken}
        )
        assert (config.fp4, config.fp4_recipe) == ("e2m1", "nvfp4")
    assert "--fp4-format" not in FLAGS[[*FLAGS][0]]
    lines = launch(tmp_path / "run", "megatron-bridge").config.splitlines()
    assert "cfg.mixed_precision.fp4 = 'e2m1'" in lines and "cfg.mixed_precision.fp4_param_gather = False" in lines


def test_sizes_that_nvfp4_does_not_take_are_refused_as_nvfp4(place: Path, tmp_path: Path) -> None:
    """48 is no multiple of 32. `resume` kept the module in BF16, and no framework has a flag for that."""
    save(tmp_path / "source", "llama-2", intermediate_size=48)
    execute(plan_command(Request(tmp_path / "source", tmp_path / "megatron", "megatron")))
    change_args(tmp_path / "megatron" / "release", fp4="e2m1", fp4_recipe="nvfp4")
    with pytest.raises(PrecisionError, match=r"Megatron-LM cannot go on in NVFP4.*NVFP4 GEMMs need multiples of 32"):
        launch(tmp_path / "megatron", "megatron-lm")


def kept_in_bf16(folder: Path, *kept: str, **sizes: int) -> dict[str, Path]:
    """A checkpoint for each framework, of a model that keeps these modules in BF16 and has FP8 state of the others."""
    save(folder / "source", "llama-2", **sizes)
    recipe = replace(PRESETS["fp8-delayed"], keep_bf16=kept)
    into = {"precision": "fp8", "recipe": recipe}
    execute(plan_command(Request(folder / "source", folder / "megatron", "megatron", **into)))
    execute(plan_command(Request(folder / "megatron", folder / "hf", "hf", precision="bf16")))
    frameworks_of = {"megatron": ("megatron-lm", "megatron-bridge"), "hf": ("nemo", "accelerate")}
    return {framework: folder / name for name, each in frameworks_of.items() for framework in each}


def test_every_framework_says_which_modules_leave_bf16(tmp_path: Path) -> None:
    """No framework has a flag for them, and a conversion has no recipe of a run to say so, only their lack of state."""
    for framework, checkpoint in kept_in_bf16(tmp_path, "*.linear_fc2").items():
        said = [note for note in launch(checkpoint, framework).notes if "no FP8 state" in note]
        assert len(said) == 1 and said[0].startswith("2 modules have no FP8 state"), (framework, said)
        assert said[0].endswith(": decoder.layers.*.mlp.linear_fc2")


def test_fp8_that_transformer_engine_would_refuse_at_the_first_pass_is_refused(tmp_path: Path) -> None:
    """104 is no multiple of 16. accelerate leaves such linears as they are (utils/transformer_engine.py,
    convert_model), and so is no way out of BF16 for them."""
    of_frameworks = kept_in_bf16(tmp_path, "*.linear_fc2", intermediate_size=104)
    accelerated = launch(of_frameworks.pop("accelerate"), "accelerate")
    assert "fp8" in flags_of(accelerated) and not any("no FP8 state" in note for note in accelerated.notes)
    for framework, checkpoint in of_frameworks.items():
        with pytest.raises(PrecisionError, match=r"linear_fc2.*\[64, 104\].*multiples of 16.*--precision bf16"):
            launch(checkpoint, framework)
    execute(plan_command(Request(tmp_path / "megatron", tmp_path / "again", "megatron", precision="bf16")))
    assert "--fp8-format" not in flags_of(launch(tmp_path / "again", "megatron-lm"))


def test_an_fp8_lm_run_brings_megatrons_precision_aware_optimizer(place: Path, tmp_path: Path) -> None:
    """As TE's FusedAdam is asked for what the run keeps (docs/fp8_lm.md); without it, nothing is said."""
    for preset in ("fp8-lm", "adamw"):
        made = settings(place / "source", place / "text", tmp_path / preset, train__steps=1, optimizer__preset=preset)
        run(made)
    for version in FLAGS:
        read = parse(version, flags_of(launch(tmp_path / "fp8-lm", "megatron-lm")))
        assert read.use_distributed_optimizer and read.use_precision_aware_optimizer
        dtypes = read.main_grads_dtype, read.main_params_dtype, read.exp_avg_dtype, read.exp_avg_sq_dtype
        assert dtypes == ("bf16", "fp16", "fp8", "fp16")
    said = flags_of(launch(tmp_path / "adamw", "megatron-lm"))
    assert not any("dtype" in word or "precision-aware" in word for word in said)


def test_a_run_by_muon_brings_megatrons(place: Path, tmp_path: Path) -> None:
    """Also after a conversion, which keeps Megatron's arguments. Which flags only some versions have is said."""
    keys = {"momentum": 0.95, "num_ns_steps": 10, "extra_scale_factor": 0.2, "scale_mode": "unit_rms_norm"}
    changed = {f"optimizer__muon_{key}": value for key, value in keys.items()}
    plain = settings(place / "source", place / "text", tmp_path / "muon", train__steps=1, optimizer__preset="muon")
    run(plain)
    asked = {"optimizer__muon_nesterov": "true", "optimizer__muon_coefficient_type": "simple"}
    run(
        settings(
            place / "source",
            place / "text",
            tmp_path / "changed",
            train__steps=1,
            optimizer__preset="muon",
            optimizer__muon_split_qkv="false",
            **asked,
            **changed,
        )
    )
    execute(plan_command(Request(tmp_path / "changed", tmp_path / "cut", "megatron", parallelism=Parallelism(2))))
    for version in ("core_v0.16.1", "core_v0.19.0"):
        read = parse(version, flags_of(launch(tmp_path / "muon", "megatron-lm")))
        assert (read.optimizer, read.muon_momentum, read.muon_num_ns_steps) == ("muon", 0.9, 5)
        assert (read.muon_scale_mode, read.muon_extra_scale_factor) == ("spectral", 1.0)
        assert read.muon_split_qkv and read.muon_tp_mode == "duplicated"
        assert not read.use_distributed_optimizer
    for name in ("changed", "cut"):
        found = launch(tmp_path / name, "megatron-lm")
        words = flags_of(found)
        at = words.index("--muon-coefficient-type")
        assert words[at + 1] == "simple"
        read = parse("core_v0.16.1", words[:at] + words[at + 2 :])
        assert {key: getattr(read, f"muon_{key}") for key in keys} == keys
        assert read.muon_use_nesterov and not read.muon_split_qkv
        assert any("--muon-nesterov from core 0.18" in note for note in found.notes)
        assert any("--muon-coefficient-type is there from core 0.17" in note for note in found.notes)


@pytest.mark.parametrize("key", MUON_KEYS)
def test_each_setting_of_muon_that_a_recipe_has_is_said_to_megatron_if_it_is_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    usual = getattr(Optimizer(), key)
    words = get_args(get_type_hints(Optimizer)[key])
    other = words[1] if words else not usual if isinstance(usual, bool) else type(usual)(usual / 2)
    assert other != usual
    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(lambda _: {"optimizer.state.exp_avg.x": None}))

    def flags(value: object) -> list[str]:
        said = {"optimizer": "muon", key: value}
        monkeypatch.setattr(TorchDistReader, "args", {**TorchDistReader(place / "bf16").args, **said})
        found = FRAMEWORKS["megatron-lm"](LaunchSource(open_checkpoint(place / "bf16"), place / "bf16"))
        return flags_of(found)

    version = "core_v0.19.0" if key == "muon_coefficient_type" else "core_v0.16.1"
    name = "muon_use_nesterov" if key == "muon_nesterov" else key
    assert getattr(parse(version, flags(other)), name) == other
    for odd in ("\n--other", [other], {}, -1):
        assert not any(word.startswith("--muon") for word in flags(odd))
    if key == "muon_num_ns_steps":  # torch takes below 100, Megatron any number
        assert getattr(parse(version, flags(120)), name) == 120


@pytest.mark.parametrize("steps", [5, 7, 10])
@pytest.mark.parametrize("kind", ["quintic", "simple"])
def test_steps_of_muon_that_an_older_package_refuses_are_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, steps: int, kind: str
) -> None:
    """emerging_optimizers 0.1.0, muon_utils.py: newton_schulz raises unless all of its sets are taken equally often."""
    said = {"optimizer": "muon", "muon_num_ns_steps": steps, "muon_coefficient_type": kind}
    monkeypatch.setattr(TorchDistReader, "args", {**TorchDistReader(place / "bf16").args, **said})
    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(lambda _: {"optimizer.state.exp_avg.x": None}))
    found = FRAMEWORKS["megatron-lm"](LaunchSource(open_checkpoint(place / "bf16"), place / "bf16"))
    refused = [note for note in found.notes if "--muon-num-ns-steps 7 is no multiple of 5" in note]
    assert bool(refused) == (steps == 7 and kind == "quintic")


def test_a_checkpoint_without_extra_state_is_loaded_less_strictly(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bf16", "fp8"):  # in BF16 it is empty, and there
        found = launch(place / name, "megatron-lm")
        assert parse("core_v0.16.1", flags_of(found)).dist_ckpt_strictness is None
        assert not any("_extra_state" in note for note in found.notes)
        assert "strictness" not in launch(place / name, "megatron-bridge").config
    monkeypatch.setattr(TorchDistReader, "objects", ["rng_state/shard_0.0_1.1"])
    read = parse("core_v0.16.1", flags_of(launch(place / "bf16", "megatron-lm")))
    assert read.dist_ckpt_strictness == "log_all"


def test_an_optimizer_of_megatron_is_loaded_and_generators_that_are_not_there_are_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = LaunchSource(open_checkpoint(place / "bf16"), place / "bf16")
    found = {"optimizer.state.exp_avg.x": None}
    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(lambda _: found))
    flags = flags_of(FRAMEWORKS["megatron-lm"](subject))
    assert "--no-load-rng" in flags and "--no-load-optim" not in flags
    monkeypatch.setattr(TorchDistReader, "objects", ("rng_state/shard_0_1",))
    assert "--no-load-rng" not in flags_of(FRAMEWORKS["megatron-lm"](subject))


@pytest.mark.parametrize("size", ["1; touch executed", -1, 1 << 40, [2], 2.0])
@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge"])
def test_a_stranger_s_sizes_are_sizes_or_nothing_is_printed(
    place: Path, framework: str, size: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {**open_checkpoint(place / "bf16").args, "tensor_model_parallel_size": size}  # type: ignore[attr-defined]
    monkeypatch.setattr(TorchDistReader, "args", args)
    with pytest.raises(DamagedCheckpoint, match="tensor_model_parallel_size"):
        launch(place / "bf16", framework)


def set_by(config: str) -> dict[str, object]:
    """What the lines of a snippet assign, by dotted name."""
    found: dict[str, object] = {}
    for node in ast.parse(config).body:
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return found


def test_bridge_gets_lines_of_its_own_config(place: Path) -> None:
    """Names of ConfigContainer's parts in Megatron-Bridge 0.3.1 (training/config.py, tokenizers/config.py,
    mixed_precision.py)."""
    found = launch(place / "fp8", "megatron-bridge")
    given = set_by(found.config)
    weights = open_checkpoint(place / "fp8").path
    assert given["cfg.checkpoint.pretrained_checkpoint"] == str(weights)
    assert given["cfg.checkpoint.load_optim"] is given["cfg.checkpoint.load_rng"] is False
    assert given["cfg.mixed_precision.fp8"] == "hybrid" and given["cfg.mixed_precision.fp8_amax_history_len"] == 4
    assert "bf16_with_fp8_delayed_scaling_mixed()" in found.config
    known = {field.name for field in fields(TransformerConfig)}
    assert {name.rpartition(".")[2] for name in given if name.startswith("cfg.model.")} - known == {"seq_length"}


def test_nemo_imports_hugging_face_s_directories_and_is_told_what_it_cannot_open(place: Path) -> None:
    found = launch(place / "hf", "nemo")
    compile(found.config, "nemo", "exec")
    assert f"hf://{place / 'hf'}" in found.config and "fp8_amax_history_len=4" in found.config
    assert "MODEL, an llm.LlamaModel with the config of its size" in found.yours
    with pytest.raises(CheckpointError, match="--framework megatron-bridge"):
        launch(place / "fp8", "nemo")


def test_nemo_goes_on_in_the_fp8_of_its_own_run_that_keeps_no_state(place: Path, tmp_path: Path) -> None:
    """The arguments of MegatronMixedPrecision are those of NeMo 2.7.3 (lightning/pytorch/plugins/mixed_precision.py);
    it writes them into the model's config (update_config_with_dtype_overrides)."""
    weights = tmp_path / "weights"
    shutil.copytree(open_checkpoint(place / "bf16").path, weights)
    shutil.rmtree(weights / "precisionctl")
    config = yaml.safe_load((weights / "run_config.yaml").read_text())["model"]
    (weights / "run_config.yaml").unlink()
    torch.save({}, weights / "common.pt")
    said = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    said |= {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1}
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "model.yaml").write_text(yaml.safe_dump({"config": config | said}))
    found = launch(tmp_path, "nemo")
    (plugin,) = (line for line in found.config.splitlines() if line.startswith("plugin = "))
    given = {word.arg: ast.literal_eval(word.value) for word in ast.parse(plugin).body[0].value.keywords}
    assert given == {"precision": "bf16-mixed", **said} and found.notes == ()


def test_a_family_that_nemo_does_not_import_is_refused_with_those_that_it_does(tmp_path: Path) -> None:
    """Its importers are of classes of these names in NeMo 2.7.3 (collections/llm/gpt/model)."""
    save(tmp_path / "hf", "gpt2", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="NeMo 2 imports no gpt2.*llama.*--framework megatron-bridge"):
        launch(tmp_path / "hf", "nemo")


def test_accelerate_takes_the_recipe_and_hugging_face_s_directories_alone(place: Path) -> None:
    """Options and choices of accelerate 1.15.0 (commands/launch.py)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--fp8_backend", choices=["ao", "te", "msamp"])
    parser.add_argument("--fp8_format", choices=["HYBRID", "E4M3", "E5M2"])
    parser.add_argument("--fp8_amax_compute_algo", choices=["max", "most_recent"])
    for name in ("--fp8_margin", "--fp8_amax_history_len"):
        parser.add_argument(name, type=int)
    read = parser.parse_args(flags_of(launch(place / "hf", "accelerate")))
    assert (read.mixed_precision, read.fp8_backend, read.fp8_format) == ("fp8", "te", "HYBRID")
    assert (read.fp8_margin, read.fp8_amax_history_len, read.fp8_amax_compute_algo) == (0, 4, "max")
    assert parser.parse_args(flags_of(launch(place / "source", "accelerate"))).mixed_precision == "bf16"
    with pytest.raises(CheckpointError, match="--to hf"):
        launch(place / "fp8", "accelerate")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("framework", ["accelerate", "nemo"])
def test_hugging_face_s_names_in_another_trainer_s_container_are_no_directory_of_it(
    tmp_path: Path, framework: str
) -> None:
    model = make_and_save(tmp_path / "hf")
    pytorch(tmp_path / "run" / "dcp", *trained_models.trained("llama-3"))
    states = deepspeed_files.states_of(dict(model.named_parameters()))
    deepspeed_files.save_universal(tmp_path / "run" / "universal", states)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "run")
    assert launch(tmp_path / "hf", framework).yours
    for name in ("dcp", "universal"):
        assert open_checkpoint(tmp_path / "run" / name).layout == "hf"
        with pytest.raises(CheckpointError, match="--to hf"):
            launch(tmp_path / "run" / name, framework)


def test_a_tokenizer_is_one_without_a_file_of_that_name(tmp_path: Path) -> None:
    save(tmp_path / "hf", "gpt2", dtype=torch.bfloat16)
    letters = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\na b\n")
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron")))
    read = parse("core_v0.19.0", flags_of(launch(tmp_path / "megatron", "megatron-lm")))
    assert AutoTokenizer.from_pretrained(read.tokenizer_model).encode("aba") == [2, 0]


def test_the_tokenizer_that_bridge_saves_beside_weights_is_used_if_it_is_transformers_own(
    place: Path, tmp_path: Path
) -> None:
    execute(plan_command(Request(place / "hf", tmp_path / "run", "megatron")))
    directory = tmp_path / "run/release"
    kept = directory / "precisionctl/hf"
    tokenizer = AutoTokenizer.from_pretrained(kept)
    for file in [*kept.glob("*token*"), *kept.glob("*.jinja")]:
        file.unlink()
    assert "tokenizer_model" not in launch(tmp_path / "run", "megatron-bridge").config
    tokenizer.save_pretrained(directory / "tokenizer")
    saved = str(directory / "tokenizer")
    assert parse("core_v0.19.0", flags_of(launch(tmp_path / "run", "megatron-lm"))).tokenizer_model == saved
    assert set_by(launch(tmp_path / "run", "megatron-bridge").config)["cfg.tokenizer.tokenizer_model"] == saved
    (directory / "tokenizer/tokenizer_config.json").unlink()  # as of Bridge's TikTokenizer
    assert "tokenizer_model" not in launch(tmp_path / "run", "megatron-bridge").config
    shutil.move(saved, tmp_path / "elsewhere")
    (directory / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="leads out of the directory"):
        launch(tmp_path / "run", "megatron-bridge")


def test_the_command_prints_what_a_shell_takes_and_json(place: Path) -> None:
    words = ["launch-args", str(place / "fp8"), "--framework", "megatron-lm"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    script = [line for line in shown.output.replace("\\\n", "").splitlines() if not line.startswith(("#", "export"))]
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert [shlex.split(line) for line in script] == [found["command"]]
    assert "export NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in shown.output.splitlines()
    assert set(FRAMEWORKS) == set(main.commands["launch-args"].params[1].type.choices)  # type: ignore[attr-defined]


def test_layers_of_multi_token_prediction_that_are_not_there_are_not_asked_for(tmp_path: Path) -> None:
    """transformers saves models without them, and their config.json claims them all the same: Megatron would look
    for their tensors."""
    megatron = converted(tmp_path, "glm4-moe")
    config = next(megatron.rglob("precisionctl/hf/config.json"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    assert open_checkpoint(megatron).model.mtp_num_layers == 1
    assert "--mtp-num-layers" not in flags_of(launch(megatron, "megatron-lm"))
    assert set_by(launch(megatron, "megatron-bridge").config)["cfg.model.mtp_num_layers"] is None


def test_an_optimizer_without_a_schedule_comes_with_what_to_do(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's load_checkpoint takes `opt_param_scheduler` from a checkpoint whose optimizer it loads, and ends
    with a KeyError where there is none."""
    subject = LaunchSource(open_checkpoint(place / "bf16"), place / "bf16")
    assert not any("schedule" in note for note in FRAMEWORKS["megatron-lm"](subject).notes)
    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(lambda _: {"optimizer.state.exp_avg.x": None}))
    (note,) = [note for note in FRAMEWORKS["megatron-lm"](subject).notes if "schedule" in note]
    assert f"precisionctl resume {place / 'bf16'}" in note and "--no-load-optim" in note
