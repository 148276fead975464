"""A model saved inside another program's module is read by the names that it has itself."""

from collections.abc import Callable
from pathlib import Path

import conversions
import pico
import pytest
import torch
from any_models import export
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from soaking import in_soak
from target_checks import check_directory
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint


def with_layers_checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    layers = model.model.layers  # type: ignore[union-attr]
    for at, layer in enumerate(layers):  # type: ignore[arg-type]
        layers[at] = checkpoint_wrapper(layer)  # type: ignore[operator,index]
    return model


def compiled_in_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """With the names of OptimizedModule, whose import takes seconds, and of DDP, which asks for a process group."""
    return torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": model})})


WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "layers": with_layers_checkpointed,
    "whole": compiled_in_ddp,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_transformers_loads_what_is_made_of_a_wrapped_model(tmp_path: Path, wrapper: str) -> None:
    pico.save(tmp_path / "source", "llama-3")
    path = tmp_path / "source" / "model.safetensors"
    before = load_file(path)
    model = WRAPPERS[wrapper](AutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    state = dict(model.named_parameters())  # state_dict() leaves out the words of some
    assert not state.keys() & {"model.layers.0.mlp.up_proj.weight"}  # or it would hold of any reader
    save_file({name: values.detach().clone() for name, values in state.items()}, path, metadata={"format": "pt"})
    notes = conversions.run(tmp_path / "source", tmp_path / "out", "hf").notes
    assert any("Names are without those of modules around the model" in note for note in notes)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())


@pytest.mark.parametrize("around", ["base_model.model.", f"module.{FSDP_WRAPPED_MODULE}.", "module.module."])
def test_a_word_around_the_whole_is_none_of_the_model(tmp_path: Path, around: str) -> None:
    pico.save(tmp_path, "llama-3")
    names = set(open_checkpoint(tmp_path).specs)
    path = tmp_path / "model.safetensors"
    save_file({around + name: values for name, values in load_file(path).items()}, path)
    assert set(open_checkpoint(tmp_path).specs) == names


def test_an_export_with_such_names_is_found_by_no_engine(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "out")
    assert check_directory(tmp_path / "out", "vllm").passes
    path = tmp_path / "out" / "model.safetensors"
    save_file({f"_orig_mod.{name}": values for name, values in load_file(path).items()}, path)
    (found,) = check_directory(tmp_path / "out", "vllm").findings
    assert found.where.startswith("_orig_mod.") and found.rule.fatal


@pytest.mark.parametrize("target", ["vllm", *in_soak("transformers")])
def test_a_model_that_lacks_a_tensor_or_rows_of_one_is_loaded_by_no_engine(tmp_path: Path, target: str) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    conversions.carry_out(Request.export(tmp_path / "hf", tmp_path / "out", target))
    path = tmp_path / "out" / "model.safetensors"
    whole = load_file(path)
    with safe_open(path, "pt") as file:
        said = file.metadata()
    name = "model.layers.0.post_attention_layernorm.weight"
    for spoilt in ({key: each for key, each in whole.items() if key != name}, whole | {name: whole[name][:-1]}):
        save_file(spoilt, path, said)
        checked = check_directory(tmp_path / "out", target)
        assert not checked.passes and any("of the model are there" in each.rule.text for each in checked.findings)


def test_a_word_stands_before_the_name_of_a_tensor_of_all_experts_too(tmp_path: Path) -> None:
    pico.save(tmp_path, "gpt-oss", dtype=torch.bfloat16)
    before = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.replace(".experts.", ".experts._orig_mod."): values for name, values in load_file(path).items()}
    save_file(tensors, path)
    after = open_checkpoint(tmp_path)
    assert after.specs == before.specs and "model.layers.0.mlp.experts.down_proj[1]" in after.specs


def test_two_tensors_with_one_name_inside_are_damage(tmp_path: Path) -> None:
    pico.save(tmp_path, "llama-3")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model._orig_mod.norm.weight": torch.ones(64)}, path)
    with pytest.raises(DamagedCheckpoint, match=r"model\._orig_mod\.norm\.weight.*model\.norm\.weight"):
        open_checkpoint(tmp_path)
