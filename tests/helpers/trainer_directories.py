"""A model after two updates, saved as each trainer saves it."""

from pathlib import Path
from typing import Any

import deepspeed_files
import torch
import trained_models
import verl_files


def hf_trainer(path: Path, model: Any, optimizer: Any) -> Path:
    model.save_pretrained(path)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


def pytorch(path: Path, model: Any, optimizer: Any) -> Path:
    return trained_models.config_of(model, trained_models.save(path, trained_models.states(model, optimizer)))


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
