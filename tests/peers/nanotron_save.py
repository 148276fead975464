"""nanotron's own model, save_weights, load_weights and converter, on CPU processes: nanotron_save.py OUT KIND [judge].

OUT/10 is what several ranks save. With `judge` one rank loads it, and OUT/theirs.pt is what examples/llama makes of it.
KIND is `plain`, `interleaved` or `tied`. NANOTRON is a clone of nanotron. It is made for GPUs: what only computes is
replaced before it is imported.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._dynamo
import torch.distributed as dist
import transformers

OUT, KIND, JUDGES = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
STUBS = ("flash_attn", "datasets", "datatrove", "einops", "grouped_gemm", "psutil", "triton")
CLONE = os.environ["NANOTRON"]
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path[:0] = [f"{CLONE}/src", f"{CLONE}/examples"]


class Stub(types.ModuleType):
    __path__: list[str] = []
    __version__ = "9.9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Stubs())
torch.cuda.set_device = lambda *_: None
torch.cuda.device = lambda *_: None

import nanotron.models.llama as llama  # noqa: E402
from llama.convert_nanotron_to_hf import convert_nt_to_hf, get_hf_config  # noqa: E402
from nanotron.config import LlamaConfig, OneForwardOneBackwardPipelineEngine, ParallelismArgs  # noqa: E402
from nanotron.models import build_model  # noqa: E402
from nanotron.parallel import ParallelContext  # noqa: E402
from nanotron.parallel.pipeline_parallel.p2p import P2P  # noqa: E402
from nanotron.parallel.tensor_parallel.nn import TensorParallelLinearMode  # noqa: E402
from nanotron.serialize.weights import load_weights, save_weights  # noqa: E402
from nanotron.trainer import mark_tied_parameters  # noqa: E402

llama.P2P = lambda group, device: P2P(group, device=torch.device("cpu"))


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=KIND == "tied",
        rope_interleaved=KIND == "interleaved",
    )
    context = ParallelContext(data_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=ranks)
    parallel = ParallelismArgs(
        dp=1,
        pp=1,
        tp=ranks,
        pp_engine=OneForwardOneBackwardPipelineEngine(),
        tp_mode=TensorParallelLinearMode.ALL_REDUCE,
        tp_linear_async_communication=False,
    )
    model = build_model(
        model_builder=lambda: llama.LlamaForTraining(
            config=config, parallel_context=context, parallel_config=parallel, random_states=None
        ),
        parallel_context=context,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    mark_tied_parameters(model=model, parallel_context=context)
    step = OUT / "10"
    if JUDGES:
        load_weights(model=model, parallel_context=context, root_folder=step)
        theirs = transformers.LlamaForCausalLM(get_hf_config(config))
        convert_nt_to_hf(model, theirs, config, interleave_qkv=KIND == "interleaved")
        torch.save(theirs.state_dict(), OUT / "theirs.pt")
        return
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 if parameter.ndim > 1 else torch.ones_like(parameter))
    save_weights(model=model, parallel_context=context, root_folder=step)
    if dist.get_rank() == 0:  # as its trainer does
        (step / "model_config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    dist.barrier()


if __name__ == "__main__":
    main()
