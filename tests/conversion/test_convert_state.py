"""What becomes of FP8 state in a conversion: made, carried, set aside or refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import in_memory
import pico
import pytest
import torch
from conversions import run, tensors
from te_pickles import pickled, recipe_object
from te_states import same

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import MappingError, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.extra_state import read_payload
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.state import DelayedScaling, Fp8State, RoleState
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS

PROJ = "decoder.layers.1.self_attention.linear_proj"


def test_bf16_to_fp8_fills_the_weight_role_as_one_update_would(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", recipe=PRESETS["fp8-delayed"])
    states, values = open_checkpoint(tmp_path / "fp8").fp8, tensors(tmp_path / "fp8")
    assert states is not None and len(states.modules) == 8
    for module, state in states.modules.items():
        expected = after_one_update(values[f"{module}.weight"].abs().max().float(), "weight", DelayedScaling())
        assert torch.equal(state.roles["weight"].scale, expected.scale)
        assert torch.equal(state.roles["weight"].amax_history, expected.amax_history)
        assert not state.roles["input"].recorded


def test_a_weight_of_zeros_is_not_said_to_wait_for_histories_that_are_there(tmp_path: Path) -> None:
    """Its amax is never recorded, by no number of passes; what lacks a history beside it still is."""
    model = pico.make_and_save(tmp_path / "hf", dtype=torch.bfloat16)
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "hf")
    states = in_memory.recorded(open_checkpoint(tmp_path / "hf"))
    roles = states.modules[PROJ].roles
    for case, lacking in {"zeros": ("weight",), "no history": ("weight", "input", "grad_output")}.items():
        fresh = {role: RoleState.fresh(4) if role in lacking else part for role, part in roles.items()}
        given = tmp_path / f"{case}.safetensors"
        sidecar.write(given, replace(states, modules={**states.modules, PROJ: Fp8State(fresh)}))
        work = run(tmp_path / "hf", tmp_path / case, "megatron", precision="fp8", fp8_state=given)
        said = [note for note in work.notes if "come from the weights" in note]
        assert [note.partition(" module")[0] for note in said] == (["Weight scales of 1"] if len(lacking) > 1 else [])


def test_fp8_to_hugging_face_and_back_loses_no_state(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    run(tmp_path / "fp8", tmp_path / "over", "hf")
    run(tmp_path / "over", tmp_path / "bf16", "megatron", precision="bf16")
    run(tmp_path / "bf16", tmp_path / "again", "megatron", precision="fp8")
    first, last = open_checkpoint(tmp_path / "fp8").fp8, open_checkpoint(tmp_path / "again").fp8
    assert first is not None and last is not None
    assert first.recipe == last.recipe and first.modules.keys() == last.modules.keys()
    for module, state in first.modules.items():
        for role, part in state.roles.items():
            assert torch.equal(part.scale, last.modules[module].roles[role].scale)
            assert torch.equal(part.amax_history, last.modules[module].roles[role].amax_history)


@pytest.mark.parametrize(
    ("te_version", "said"),
    [(1, "Transformer Engine 0.6 to 1.14"), (2, "only where NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1")],
)
def test_payloads_are_written_for_either_generation_and_what_loads_them_is_said(
    tmp_path: Path, te_version: TeVersion, said: str
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", te_version=te_version)
    assert any(said in note for note in work.notes)
    reader = open_checkpoint(tmp_path / "fp8")
    assert isinstance(reader, TorchDistReader)
    payload = read_payload(
        reader.read_object(next(key for key in reader.objects if "linear_fc1" in key)).numpy().tobytes(), ""
    )
    assert payload is not None and payload.assumed == (te_version == 1)
    again = run(tmp_path / "fp8", tmp_path / "bf16", "megatron", precision="bf16")
    assert any("has no recipe" in note for note in again.notes) == (te_version == 1)
    assert not any(said in note for note in again.notes)


def test_bf16_writes_no_payload_and_keeps_the_state_aside(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    for container in ("torch_dist", "torch"):
        made = tmp_path / container
        run(tmp_path / "fp8", made, "megatron", precision="bf16", container=container)
        reader = open_checkpoint(made)
        if isinstance(reader, TorchDistReader):
            values = [reader.read_object(key) for key in reader.objects if "_extra_state" in key]
        else:
            saved = torch.load(made / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
            values = [value for name, value in saved.items() if "_extra_state" in name]
        assert values and all(value.numel() == 0 for value in values)
        aside, carried = sidecar.find(made / "release"), open_checkpoint(tmp_path / "fp8").fp8
        assert aside is not None and carried is not None
        assert aside.modules.keys() == carried.modules.keys()


def test_state_in_which_experts_columns_are_unclear_is_refused_until_told(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "mixtral", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "plain", "megatron", container="torch")
    file = tmp_path / "plain" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    recipe = recipe_object(DelayedScaling(amax_history_len=2), (2, 3))
    tensors = {"scale_fwd": torch.arange(1.0, 13), "scale_bwd": torch.arange(1.0, 9)}
    tensors |= {"amax_history_fwd": torch.ones(2, 12), "amax_history_bwd": torch.ones(2, 8)}
    payload = pickled({"recipe": recipe, **tensors, "extra_fp8_variables": {"num_gemms": 4}})
    name = "decoder.layers.0.mlp.experts.linear_fc1._extra_state"
    assert name in saved["model"]
    saved["model"][name] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    torch.save(saved, file)
    with pytest.raises(PrecisionError, match="--grouped-columns gemm"):
        run(tmp_path / "plain", tmp_path / "out", "megatron", precision="bf16")
    work = run(tmp_path / "plain", tmp_path / "out", "megatron", precision="bf16", grouped_columns="gemm")
    assert any("expert by expert, as TE since 2.3, as told" in note for note in work.notes)
    found = open_checkpoint(tmp_path / "out").fp8
    assert found is not None
    weight = found.modules["decoder.layers.0.mlp.experts.linear_fc1"].roles["weight"]
    assert weight.scale.tolist() == [2.0, 5.0, 8.0, 11.0]


def test_experts_state_goes_through_every_size_and_layout(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "mixtral", dtype=torch.bfloat16)
    way: list[tuple[str, dict[str, Any]]] = [
        ("megatron", {"container": "torch", "parallelism": Parallelism(tensor=2, expert=2), "precision": "fp8"}),
        ("megatron", {"parallelism": Parallelism(expert=4)}),
        ("megatron", {"container": "torch", "parallelism": Parallelism(pipeline=2, expert=4), "te_version": 1}),
        ("hf", {}),
        ("megatron", {"parallelism": Parallelism(pipeline=2, expert=2), "precision": "fp8"}),
    ]
    source, states = tmp_path / "hf", []
    for number, (to, options) in enumerate(way):
        run(source, tmp_path / str(number), to, **options)
        source = tmp_path / str(number)
        states.append(open_checkpoint(source).fp8)
    assert states[0] is not None
    experts = states[0].modules["decoder.layers.1.mlp.experts.linear_fc2"].roles["weight"]
    assert experts.scale.shape == (4,) and experts.recorded
    for state in states[1:]:
        assert state is not None and state.modules.keys() == states[0].modules.keys()
        assert all(same(state.modules[name], expected) for name, expected in states[0].modules.items())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "some-kept", "last-kept"])
def test_a_recipe_says_which_modules_get_state(tmp_path: Path, recipe: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    delayed = PRESETS["fp8-delayed"]
    presets = {
        **PRESETS,
        "some-kept": replace(delayed, keep_bf16=("*.linear_fc2",)),
        "last-kept": replace(delayed, num_layers_at_end_in_bf16=1),
    }
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", recipe=presets[recipe])
    states = open_checkpoint(tmp_path / "fp8").fp8
    if recipe in PRESETS:
        assert states is None
    elif recipe == "last-kept":
        assert states is not None and {name.split(".")[2] for name in states.modules} == {"0"}
    else:
        assert states is not None
        assert {name.rpartition(".")[2] for name in states.modules} == {"linear_qkv", "linear_proj", "linear_fc1"}


@pytest.mark.parametrize(
    ("recipe", "spelling"),
    [
        ("fp8-current", ("compressed-tensors", "token")),
        ("fp8-block", ("fp8", [128, 128])),
        ("mxfp8", ("modelopt", "MXFP8")),
    ],
)
def test_fp8_for_hugging_face_is_what_the_recipe_computes_and_needs_no_state(
    tmp_path: Path, recipe: str, spelling: tuple[str, Any]
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256, head_dim=64)
    run(tmp_path / "hf", tmp_path / "fp8", "hf", precision="fp8", recipe=PRESETS[recipe])
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    found = {
        "compressed-tensors": lambda: said["config_groups"]["group_0"]["input_activations"]["strategy"],
        "fp8": lambda: said["weight_block_size"],
        "modelopt": lambda: said["quant_algo"],
    }[said["quant_method"]]()
    assert (said["quant_method"], found) == spelling


def test_state_of_a_module_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    run(tmp_path / "fp8", tmp_path / "over", "hf")
    pico.save(tmp_path / "short", dtype=torch.bfloat16, num_hidden_layers=1)
    shutil.copytree(tmp_path / "over" / "precisionctl", tmp_path / "short" / "precisionctl")
    with pytest.raises(MappingError, match=r"FP8 state of `decoder.layers.1.mlp.linear_fc1`"):
        run(tmp_path / "short", tmp_path / "out", "megatron")
    run(tmp_path / "short", tmp_path / "out", "megatron", drop_fp8_state=True)
