"""Pico models after some updates of torch's AdamW, and what they are saved as."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pico
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import PreTrainedModel

MOMENTS = ("exp_avg", "exp_avg_sq")
RATE = 1e-2


def save(directory: Path, state: Mapping[str, object]) -> Path:
    dcp.save(dict(state), storage_writer=FileSystemWriter(directory), no_dist=True)
    return directory


def config_of(model: PreTrainedModel, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    return directory


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """Norms and biases without decay, as trainers have it."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def train(model: PreTrainedModel, optimizer: torch.optim.AdamW, steps: range) -> list[float]:
    """The loss of each step."""
    losses = []
    for step in steps:
        ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained(family: str, updates: int = 2, **changes: Any) -> tuple[PreTrainedModel, torch.optim.AdamW]:
    model = pico.make(family, **changes)
    optimizer = adamw(model)
    train(model, optimizer, range(updates))
    return model, optimizer


def states(model: PreTrainedModel, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """`model` and `optimizer` of PyTorch's get_state_dict."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def moments(model: PreTrainedModel, optimizer: torch.optim.AdamW, kind: str) -> dict[str, Tensor]:
    """Those of a kind, by the parameter's name, of all to which a gradient has come."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter in optimizer.state)
    return {name: optimizer.state[parameter][kind] for name, parameter in trained}
