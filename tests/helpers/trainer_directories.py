"""A model after two updates, saved as each trainer saves it."""

import re
from pathlib import Path
from typing import Any

import deepspeed_files
import torch
import torch.distributed.checkpoint as dcp
import trained_models
import verl_files
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict


def hf_trainer(path: Path, model: Any, optimizer: Any) -> Path:
    model.save_pretrained(path)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


def pytorch(path: Path, model: Any, optimizer: Any) -> Path:
    return trained_models.config_of(model, trained_models.save(path, trained_models.states(model, optimizer)))


def automodel(path: Path, model: Any, optimizer: Any) -> Path:
    """Weights have published names, moments those of parameters in Automodel, which multiplies with experts from the
    right."""
    model.save_pretrained(path / "published")
    weights = load_file(path / "published" / "model.safetensors")
    writer = HuggingFaceStorageWriter(str(path / "model"), save_distributed=True)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    trained_models.config_of(model, path / "model" / ".hf_metadata")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    found = {}
    for key, value in flat.items():
        name = re.sub(r"experts\.(gate_(?=up))?(up|down)_proj\b", _stack_of_automodel, key)
        turned = name != key and isinstance(value, torch.Tensor) and value.dim() == 3
        found[name] = value.transpose(1, 2).contiguous() if turned else value
    trained_models.save(path / "optim", {"optim": found})
    return path


def _stack_of_automodel(name: re.Match[str]) -> str:
    return f"experts.{'gate_and_' if name[1] else ''}{name[2]}_projs"


def deepspeed(path: Path, model: Any, optimizer: Any) -> Path:
    states = {kind: trained_models.moments(model, optimizer, kind) for kind in trained_models.MOMENTS}
    states["fp32"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = {name: one for name, one in model.named_buffers() if name in model.state_dict()}
    deepspeed_files.save(path, states, 3, 2, buffers=buffers, step=2)
    return trained_models.config_of(model, path)


def verl(path: Path, model: Any, optimizer: Any) -> Path:
    states = {kind: trained_models.moments(model, optimizer, kind) for kind in trained_models.MOMENTS}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    verl_files.save(path, weights, states, 2, step=2)
    trained_models.config_of(model, path / "huggingface")
    return path
