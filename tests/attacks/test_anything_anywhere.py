"""Everything that a checkpoint says beside its tensors, with every part of it replaced by something of another kind: it
is read, or refused as one of our errors."""

import argparse
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes_directories
import consolidated_files
import deepspeed_files
import gemma_directories
import nemo_files
import pico
import pytest
import torch
import torchao_directories
import trained_models
import transposed_directories
import verl_files
import yaml
from fp8_directories import make
from legacy_files import ARGS, SHAPES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.architectures.megatron.megatron_args import read_megatron_args
from precisionctl.checkpoints.base import Hints, WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
from precisionctl.checkpoints.deepspeed.reader import DeepSpeedReader
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.checkpoints.verl import VerlReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import PrecisionctlError
from precisionctl.fp8 import sidecar
from precisionctl.planning.make_plan import make_plan
from precisionctl.reports import inspect

IN_JSON: list[Any] = [None, True, -1, 10**18, 1.5, float("nan"), "", "x", "\ud800", [], {}, [[1]], {"a": 1}]
IN_PICKLES: list[Any] = [None, 10**4000, "\ud800", [[1]], (1, "x"), torch.ones(3)]
Place = tuple[Any, ...]
Check = Callable[[Any, list[Any], Callable[[Any], object], Callable[[], object]], None]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    inside = vars(value) if isinstance(value, argparse.Namespace) else value
    items = inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, list) else ()
    for key, part in items:
        yield from places(part, (*at, key))


def replaced(value: Any, at: Place, new: Any) -> Any:
    if not at:
        return new
    changed = copy.copy(value)
    inside = vars(changed) if isinstance(changed, argparse.Namespace) else changed
    inside[at[0]] = replaced(inside[at[0]], at[1:], new)
    return changed


@pytest.fixture(params=[0, *in_soak(*range(1, 6))])
def check(request: pytest.FixtureRequest) -> Check:
    """Reads what is written with any place replaced by a sixth of these kinds, of which there are six or more. They are
    dealt out to the places in turn: each place and each kind has its turn, and in soak each place has every kind."""

    def in_all_places(value: Any, kinds: list[Any], write: Callable[[Any], object], read: Callable[[], object]) -> None:
        write(value)
        read()
        refused = 0
        for number, at in enumerate(places(value)):
            for new in kinds[(number + request.param) % 6 :: 6]:
                write(replaced(value, at, new))
                try:
                    read()
                except PrecisionctlError:
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{new!r:.50} at {at}") from error
        assert refused

    return in_all_places


def plan_of(path: Path) -> None:
    reader = open_checkpoint(path)
    inspect.describe(reader)
    make_plan(reader, "hf" if reader.layout == "megatron" else "megatron")


@pytest.mark.parametrize("family", ["llama-3", *in_soak("deepseek-v3", "gpt-oss")])
def test_a_config(check: Check, tmp_path: Path, family: str) -> None:
    config = pico.make_and_save(tmp_path, family, dtype=torch.bfloat16).config.to_dict()
    kept = {key: value for key, value in config.items() if value is not None}
    file = tmp_path / "config.json"
    check(kept, IN_JSON, lambda v: file.write_text(json.dumps(v)), lambda: plan_of(tmp_path))


@pytest.mark.parametrize("kind", ["mistral", "llama", *in_soak("codes")])
def test_a_params_json(check: Check, tmp_path: Path, kind: str) -> None:
    made, file = tmp_path / "made", tmp_path / "made" / "params.json"
    params = consolidated_files.META | {"use_scaled_rope": True}
    if kind == "llama":
        consolidated_files.save_meta(made, params, consolidated_files.LLAMAS_MLP, 2)
    else:
        params = consolidated_files.LATENT | {"vision_encoder": consolidated_files.VISION}
        if kind == "codes":
            params = consolidated_files.DENSE | {"sliding_window": [None, 6]} | consolidated_files.FP8
        consolidated_files.save_mistral(made, params)
    check(params, IN_JSON, lambda v: file.write_text(json.dumps(v)), lambda: plan_of(made))


def test_a_config_of_nemo(check: Check, tmp_path: Path) -> None:
    nemo_files.write_ranks(tmp_path, [nemo_files.STATE])

    def write(value: object) -> None:
        (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(value))

    def read() -> None:
        reader = open_checkpoint(tmp_path)
        assert isinstance(reader, LegacyReader)
        read_megatron_args(reader.args, 16, "here")

    check(nemo_files.FIELDS, [None, True, 10**18, "x", [[1]], {"a": 1}], write, read)


def test_an_adapters_config(check: Check, tmp_path: Path) -> None:
    pico.save(tmp_path / "base", "llama-3", num_hidden_layers=1)
    module, hints = "base_model.model.model.layers.0.self_attn.q_proj", Hints(reference=tmp_path / "base")
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"q_proj": 2},
        "bias": "none",
        "alpha_pattern": {"k_proj": 1.5},
        "use_rslora": True,
        "use_dora": False,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    check(
        config,
        IN_JSON,
        lambda v: (tmp_path / "adapter_config.json").write_text(json.dumps(v)),
        lambda: make_plan(open_checkpoint(tmp_path, hints=hints), "megatron"),
    )


@pytest.mark.soak
def test_the_config_of_an_adapter_by_bridge(check: Check, tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "bridge_lora"
    shutil.copytree(golden / "adapter", tmp_path / "adapter")
    file, hints = tmp_path / "adapter" / "iter_0000007" / "run_config.yaml", Hints(reference=golden / "base")
    peft = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 4, "alpha": 12, "target_modules": ["linear_qkv"]}
    check(
        {"model": {"tensor_model_parallel_size": 1}, "peft": peft},
        IN_JSON,
        lambda v: file.write_text(json.dumps(v)),
        lambda: make_plan(open_checkpoint(tmp_path / "adapter", hints=hints), "megatron"),
    )


def of_gemma(directory: Path, spelling: str) -> None:
    gemma_directories.make(directory, "gemma4-small", gemma_directories.OF_TEXT)


@pytest.mark.parametrize(
    ("made", "spelling"),
    [
        *((make, spelling) for spelling in ("fp8-block", "modelopt-tensor")),
        *in_soak((make, "compressed-block")),
        (transposed_directories.make, "auto-round"),
        (bitsandbytes_directories.make, "nf4"),
        (torchao_directories.make, "float8-row"),
        (of_gemma, ""),
    ],
)
def test_a_quantization_config(
    check: Check, tmp_path: Path, made: Callable[[Path, str], object], spelling: str
) -> None:
    made(tmp_path, spelling)
    config = json.loads((tmp_path / "config.json").read_text())

    def write(quantization: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))

    def read() -> None:
        reader = HuggingFaceReader(tmp_path)
        make_plan(reader, "megatron")
        list(reader.encodings.values())

    check(config["quantization_config"], IN_JSON, write, read)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.soak
def test_a_quant_state_of_bitsandbytes(check: Check, tmp_path: Path) -> None:
    bitsandbytes_directories.make(tmp_path, "nf4-nested")
    file, name = tmp_path / "model.safetensors", f"{UP}.quant_state.bitsandbytes__nf4"
    tensors = load_file(file)

    def write(said: Any) -> None:
        save_file(tensors | {name: bitsandbytes_directories.quant_state(said)}, file)

    def read() -> None:
        read_tensor(HuggingFaceReader(tmp_path), UP)

    check(json.loads(bytes(tensors[name].tolist())), IN_JSON, write, read)


@pytest.mark.parametrize("spelling", ["float8-row", *in_soak("int4-group")])
def test_what_torchao_says_of_a_tensor(check: Check, tmp_path: Path, spelling: str) -> None:
    torchao_directories.make(tmp_path, spelling)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()

    def write(said: object) -> None:
        save_file(tensors, file, metadata | {UP: json.dumps(said)})

    def read() -> None:
        read_tensor(HuggingFaceReader(tmp_path), UP)

    check(json.loads(metadata[UP]), IN_JSON, write, read)


def described(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors and metadata of a file of ours."""
    with safe_open(path, framework="pt") as file:
        return load_file(path), json.loads(file.metadata()["precisionctl"])


def test_encodings(check: Check, tmp_path: Path) -> None:
    make(tmp_path / "fp8", "fp8-block")
    execute(plan_command(Request(tmp_path / "fp8", tmp_path / "bf16", "hf", "bf16")), workers=1)
    path = tmp_path / "bf16" / encodings_file.RELATIVE
    tensors, metadata = described(path)
    metadata["weights"] = dict(list(metadata["weights"].items())[:2])

    def write(said: object) -> None:
        save_file(tensors, path, {"precisionctl": json.dumps(said)})

    def read() -> None:
        found = encodings_file.find(tmp_path / "bf16")
        assert found is not None
        for name in found.weights:
            _ = found.by_name[name], found.input_scale(name)

    check(metadata, IN_JSON, write, read)


def test_a_sidecar(check: Check, tmp_path: Path) -> None:
    roles = ("input", "weight", "output", "grad_output", "grad_input")
    state = {f"decoder.layers.0.mlp.linear_fc1/{role}.scale": torch.tensor(1.0) for role in roles}
    state |= {name.replace(".scale", ".amax_history"): torch.ones(2) for name in state}
    recipe = {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 2, "amax_compute_algo": "max"}
    said = {"format_version": 1, "recipe": recipe, "producer": "x", "iteration": 1}
    path = tmp_path / "sidecar.safetensors"
    check(said, IN_JSON, lambda v: save_file(state, path, {"precisionctl": json.dumps(v)}), lambda: sidecar.read(path))


def test_a_runs_common_data(check: Check, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "dist", "megatron")), workers=1)
    common = tmp_path / "dist" / "release" / "common.pt"
    saved = torch.load(common, weights_only=False)
    check(saved, IN_PICKLES, lambda v: torch.save(v, common), lambda: plan_of(tmp_path / "dist"))


@pytest.mark.soak
def test_what_a_rank_saved(check: Check, tmp_path: Path) -> None:
    args = {**ARGS, "num_layers": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    shapes = {**SHAPES, "self_attention.linear_qkv.weight": (24, 8), "mlp.linear_fc1.weight": (32, 8)}
    shapes |= {"self_attention.linear_proj.weight": (8, 8), "mlp.linear_fc2.weight": (8, 16)}
    model = {f"decoder.layers.0.{name}": torch.ones(shape) for name, shape in shapes.items()}
    model |= {"embedding.word_embeddings.weight": torch.ones(16, 8), "output_layer.weight": torch.ones(16, 8)}
    model |= {"decoder.final_layernorm.weight": torch.ones(8)}
    states = {i: {"exp_avg": tensor, "step": torch.tensor(3.0)} for i, tensor in enumerate(model.values())}
    group = {"params": list(range(len(model))), "lr": 1e-3, "wd_mult": 1.0}
    optimizer = {"state": states, "param_groups": [group]}
    masters = [list(model.values())]
    rest = {
        "optimizer": {"optimizer": optimizer, "fp32_from_fp16_params": masters},
        "iteration": 3,
        "checkpoint_version": 3.0,
        "precisionctl": {"fp8_producer": "x", "fp8_iteration": 3},
        "opt_param_scheduler": {"max_lr": 1.0},
    }
    rank = tmp_path / "mp_rank_00"
    rank.mkdir()

    def write(value: Any) -> None:
        whole = {"args": argparse.Namespace(**args), "model": model, **value} if isinstance(value, dict) else value
        torch.save(whole, rank / "model_optim_rng.pt")

    def read() -> None:
        reader = LegacyReader(tmp_path)
        make_plan(reader, "hf")
        _ = reader.optimizer_specs, reader.fp8, reader.common, reader.iteration
        plan_command(Request(tmp_path, tmp_path.parent / "nowhere", "megatron"))

    check(rest, IN_PICKLES, write, read)


@pytest.mark.parametrize("stage", [1, *in_soak(3)])
def test_what_deepspeeds_ranks_saved(check: Check, tmp_path: Path, stage: int) -> None:
    made = deepspeed_files.states_of({"a.weight": torch.ones(5, 3), "b.weight": torch.ones(7)})
    frozen = {"c.weight": torch.ones(3, dtype=torch.bfloat16)}
    directory = deepspeed_files.save(tmp_path, made, stage, 2, frozen=frozen, shared={"d.weight": "a.weight"})

    def read() -> None:
        read_all(DeepSpeedReader(tmp_path))

    with deepspeed_files.classes():
        for kind in ("model", "optim"):
            path = max(directory.glob(f"*_{kind}_states.pt"))
            saved = torch.load(path, weights_only=False)
            saved.pop("ds_config", None)
            check(saved, IN_PICKLES, lambda v, path=path: torch.save(v, path), read)  # type: ignore[misc]
            torch.save(saved, path)


def test_what_deepspeed_saved_without_zero(check: Check, tmp_path: Path) -> None:
    saved = deepspeed_files.without_zero(deepspeed_files.states_of({"a.weight": torch.ones(5, 3)}))
    path = tmp_path / "mp_rank_00_model_states.pt"
    check(saved, IN_PICKLES, lambda value: torch.save(value, path), lambda: read_all(DeepSpeedReader(tmp_path)))


@pytest.mark.parametrize("units", [(), pytest.param((("a.weight", "b.weight"),), marks=pytest.mark.soak)])
def test_what_verls_ranks_saved(check: Check, tmp_path: Path, units: Any) -> None:
    made = deepspeed_files.states_of({"a.weight": torch.ones(5, 3), "b.weight": torch.ones(7)})
    directory = verl_files.save(tmp_path / "actor", made["fp32"], made, 2, units=units)
    for kind in ("model", "optim"):
        path = directory / f"{kind}_world_size_2_rank_1.pt"
        saved = torch.load(path, weights_only=False)
        check(saved, IN_PICKLES, lambda v, path=path: torch.save(v, path), lambda: read_all(VerlReader(directory)))  # type: ignore[misc]
        torch.save(saved, path)


def read_all(reader: Any) -> None:
    source: Any = WithOptimizer(reader)
    for name in source.specs:
        read_tensor(source, name)
    _ = reader.iteration, reader.trainer_run


def test_a_universal_checkpoint_of_deepspeed(check: Check, tmp_path: Path) -> None:
    made = deepspeed_files.states_of({"a.weight": torch.ones(5, 3)})
    deepspeed_files.save_universal(tmp_path, made)

    def read() -> None:
        reader = DeepSpeedReader(tmp_path)
        _ = [reader.chunks(name) for name in (*reader.specs, *reader.optimizer_specs)], reader.trainer_run

    for name in ("a.weight/fp32.pt", "a.weight/exp_avg.pt", "a.weight/step.pt", "optimizer_state.pt"):
        path = tmp_path / "zero" / name
        saved = torch.load(path, weights_only=False)
        check(saved, IN_PICKLES, lambda v, path=path: torch.save(v, path), read)  # type: ignore[misc]
        torch.save(saved, path)


@pytest.mark.soak
def test_the_optimizer_of_hf_trainer(check: Check, tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path, "llama-3", num_hidden_layers=1)
    optimizer = trained_models.adamw(model)
    trained_models.train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"] = {number: state for number, state in saved["state"].items() if number in (0, 1)}
    path = tmp_path / "optimizer.pt"

    def read() -> None:
        reader = HuggingFaceReader(tmp_path)
        source: Any = WithOptimizer(reader)
        for name in reader.optimizer_specs:
            read_tensor(source, name)
        _ = reader.iteration, reader.trainer_run

    check(saved, IN_PICKLES, lambda value: torch.save(value, path), read)
    torch.save(saved, path)
    step = tmp_path / "trainer_state.json"
    check({"global_step": 3}, IN_JSON, lambda value: step.write_text(json.dumps(value)), read)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_optimizer_in_a_pytorch_checkpoint(check: Check, tmp_path: Path) -> None:
    """Its settings and counts, and the shapes of its moments."""
    made = {"a.weight": torch.ones(4, 3), "b.weight": torch.ones(5)}
    state = {name: {"step": torch.tensor(2.0), "exp_avg": one, "exp_avg_sq": one + 1} for name, one in made.items()}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": [*made]}
    whole = {"model": made, "optimizer": {"state": state, "param_groups": [group]}}
    numbers = iter(range(10**6))
    folders = [tmp_path]

    def write(value: Any) -> None:
        whole = value if isinstance(value, dict) else {"x": value}
        folders[0] = trained_models.save(tmp_path / f"{next(numbers)}", whole)

    def read() -> None:
        reader = open_checkpoint(folders[0])
        assert isinstance(reader, DcpModelReader)
        for name in (*reader.specs, *reader.optimizer_specs):
            read_tensor(WithOptimizer(reader), name)
        _ = reader.iteration, reader.trainer_run
        inspect.describe(reader)

    check(whole, [None, -1, "", [[1]], torch.ones(3), {"a": torch.ones(())}], write, read)
