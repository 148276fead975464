"""Models and tokens whose loss or logits are compared with transformers' own."""

import json
from pathlib import Path

import pico
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<eos>", *(f"w{number}" for number in range(1, 250))]
TOKENS = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))


def save(directory: Path, family="llama-3", **settings):
    """A pico model with a tokenizer of one token a word."""
    model = pico.make_and_save(directory, family, **settings)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(directory)
    return model


def rows_of(text: Path, length: int):
    ids = [WORDS.index(word) for word in text.read_text().split()] + [0]
    return torch.tensor([ids[start : start + length + 1] for start in range(0, len(ids) - length, length)])


def in_fp32(directory, output=1.0):
    """What is no FP8 becomes FP32, and the output layer so many times as large."""
    file = directory / "model.safetensors"
    tensors = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in load_file(file).items()}
    settings = {"dtype": "float32"}
    if output != 1:
        tensors["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]) * output
        settings["tie_word_embeddings"] = False
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
