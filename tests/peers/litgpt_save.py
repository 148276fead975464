"""LitGPT's own models and converters: litgpt_save.py OUT NAME SIZES.

NAME is one of LitGPT's configs, and SIZES, in JSON, what is changed of it. OUT/lit is a directory as LitGPT writes it
while it trains, and OUT/older the same model as its converter wrote it before 0.5. OUT/theirs/model.pth is what
`convert_from_litgpt` makes of it, and OUT/logits.pt what LitGPT computes, of both.
"""

import json
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from litgpt import GPT, Config
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint, qkv_reassemble
from litgpt.utils import incremental_save, save_config

OUT, NAME, SIZES = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])


def main() -> None:
    config = Config.from_name(NAME, **SIZES)
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1 and "Gemma" not in NAME))
        logits = model(torch.arange(16).view(1, 16) * 5)
    folder = OUT / "lit"
    folder.mkdir(parents=True)
    optimizer = torch.optim.AdamW(model.parameters())
    # as litgpt/finetune/full.py
    fabric.save(folder / "lit_model.pth", {"model": model, "optimizer": optimizer, "iter_num": 7, "step_count": 7})
    save_config(config, folder)
    older = {
        name.replace(".qkv.", ".attn."): qkv_reassemble(tensor, config) if ".qkv." in name else tensor
        for name, tensor in model.state_dict().items()
    }
    (OUT / "older").mkdir()
    with incremental_save(OUT / "older" / "lit_model.pth") as saver:
        saver.save(older)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.load_state_dict(torch.load(OUT / "older" / "lit_model.pth"))
        assert torch.equal(model(torch.arange(16).view(1, 16) * 5), logits)
    torch.save(logits, OUT / "logits.pt")
    if not NAME.startswith("OLMo-2"):  # whose names the converter does not know as the model has them
        convert_lit_checkpoint(folder, OUT / "theirs")


if __name__ == "__main__":
    main()
