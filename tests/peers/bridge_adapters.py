"""Adapters of Megatron-Bridge on a CPU, as a program: `python bridge_adapters.py FOLDER NAME KIND`.

Bridge loads `NAME-ours`, adds LoRA to it (`KIND`: `lora`, or `canonical`, with a pair of factors for each of Q, K, V,
gate and up), fills the factors and saves them to `NAME-KIND-adapter`, as a run that trains nothing else does. What it
exports of the merged linears goes to `NAME-KIND-merged.safetensors`. `tests/golden/bridge_lora` was made so, of `lora`
and a Llama of two layers with a hidden size of 16.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from bridge_on_cpu import with_names_of_transformer_engine, without_cuda, without_packages_for_gpus

RANK, ALPHA = 4, 12


def save(model: list[Any], peft: Any, path: Path) -> None:
    """Save the adapters alone, as `save_checkpoint` does in a run with `peft`."""
    from megatron.bridge.training import config
    from megatron.bridge.training.checkpointing import save_checkpoint
    from megatron.bridge.training.state import GlobalState
    from megatron.core.utils import get_model_config

    state = GlobalState()
    state.cfg = config.ConfigContainer(
        model=get_model_config(model[0]),
        train=None,
        optimizer=config.OptimizerConfig(use_distributed_optimizer=False),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=config.LoggerConfig(),
        tokenizer=None,
        checkpoint=config.CheckpointConfig(
            async_save=False, save=str(path), save_optim=False, save_rng=False, ckpt_format="torch_dist"
        ),
        peft=peft,
        dist=None,
    )
    state.train_state.step = 7
    save_checkpoint(state, model, None, None, 0)


def main(folder: Path, name: str, kind: str) -> None:
    without_packages_for_gpus()
    without_cuda()
    warnings.simplefilter("ignore")
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.core.utils import get_model_config
    from safetensors.torch import save_file

    with_names_of_transformer_engine()
    utils.HAVE_TE = False  # the layers are megatron-core's own
    bridge = AutoBridge.from_hf_pretrained(folder / f"{name}-hf")
    with temporary_distributed_context(backend="gloo"):
        model = bridge.load_megatron_model(folder / f"{name}-ours" / "release", wrap_with_ddp=False)
        get_model_config(model[0]).use_cpu_initialization = True
        peft = {"lora": LoRA, "canonical": CanonicalLoRA}[kind](dim=RANK, alpha=ALPHA)
        model = peft(model, training=True)
        peft.set_params_to_save(model)
        torch.manual_seed(1)
        for parameter_name, parameter in model[0].named_parameters():
            if ".adapter." in parameter_name:
                torch.nn.init.normal_(parameter.data, std=0.1)
        save(model, peft, folder / f"{name}-{kind}-adapter")
        exported = bridge.export_hf_weights(model, cpu=True, show_progress=False, merge_adapter_weights=True)
        tensors = {key: values.contiguous() for key, values in exported if "_proj." in key}
        save_file(tensors, folder / f"{name}-{kind}-merged.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
