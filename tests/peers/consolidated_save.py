"""Run by the peer of consolidated files: random models of mistral-inference and of Meta's llama-models, saved as these
load them, and the logits that they give.

python consolidated_save.py FOLDER CASES

CASES is JSON: under `mistral` {name: params.json}, under `llama` {name: [params.json, number of ranks]}.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

OF_TEXT = 20
IDS = torch.arange(OF_TEXT) * 7 % 128


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: object) -> Tensor:
    """xformers' kernel, `[1, tokens, heads, size]`: of text causal, of an image not. Without a cache mistral-inference
    passes no mask on, for either."""
    heads = (each.transpose(1, 2) for each in (queries, keys, values))
    return F.scaled_dot_product_attention(*heads, is_causal=queries.shape[1] == OF_TEXT).transpose(1, 2)


class OneImage:
    """Stands in for the mask that keeps images apart."""

    @staticmethod
    def from_seqlens(lengths: list[int]) -> None:
        assert len(lengths) == 1


def without_xformers() -> None:
    names = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    made = {name: types.ModuleType(name) for name in names}
    made[names[2]].memory_efficient_attention = attention
    for name in ("AttentionBias", "BlockDiagonalCausalMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"):
        setattr(made[names[3]], name, object)
    made[names[3]].BlockDiagonalMask = OneImage
    sys.modules |= made


def randomise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.25)


def save_mistral(directory: Path, params: dict[str, Any]) -> None:
    from mistral_inference.args import TransformerArgs
    from mistral_inference.transformer import Transformer
    from safetensors.torch import save_file

    args = TransformerArgs.from_dict(params, drop_extra_fields=True)
    args.max_batch_size = 1
    torch.manual_seed(0)
    model = Transformer(args)
    randomise(model)
    directory.mkdir(parents=True)
    save_file(model.state_dict(), directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps(params))
    with torch.no_grad():
        np.save(directory / "logits.npy", model(IDS, [len(IDS)]).numpy())
        if args.vision_encoder:
            size = args.vision_encoder.image_size
            image = torch.linspace(-1, 1, 3 * size * size).view(3, size, size)
            features = model.pre_mm_projector_norm(model.vision_encoder([image]))
            side = size // args.vision_encoder.patch_size
            merged = model.patch_merger(features, image_sizes=[(side, side)])
            np.save(directory / "features.npy", model.vision_language_adapter(merged).numpy())


def save_llama(rank: int, directory: Path, params: dict[str, Any], ranks: int) -> None:
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=ranks)
    initialize_model_parallel(ranks)
    torch.manual_seed(rank)
    model = Transformer(ModelArgs(**params))
    randomise(model)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.distributed.broadcast(parameter.data, 0)
    torch.save(model.state_dict(), directory / f"consolidated.{rank:02}.pth")
    logits = model(IDS[None], 0)[0]
    if rank == 0:
        (directory / "params.json").write_text(json.dumps(params))
        np.save(directory / "logits.npy", logits.numpy())


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    without_xformers()
    for case, settings in cases["mistral"].items():
        save_mistral(folder / case, settings)
    for case, (settings, count) in cases["llama"].items():
        (folder / case).mkdir()
        torch.multiprocessing.spawn(save_llama, (folder / case, settings, count), count)
