"""Small tokenizers of the kinds that llama.cpp has, beside models of tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

TEXT = (
    "Hello  world, I've 12345 things; naïve café 🚀 we'LL see\n\n  def f(x):\n\treturn x+1  <tool> end<|endoftext|>ok"
)
MARKED = "नमस्ते दुनिया"
"""A text with combining marks."""
_CORPUS = [
    TEXT,
    *[MARKED] * 30,
    *(f"the {word} of the {word}s, there and then: {number}" for number, word in enumerate(TEXT.split())),
]
SIZE = 340
"""Tokens of the models; the tokenizers have a few less."""

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def split(expression: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


OF_FALCON = (
    pre_tokenizers.Punctuation("contiguous"),
    pre_tokenizers.ByteLevel(False),
    pre_tokenizers.Digits(False),
    split("[0-9][0-9][0-9]"),
)


def byte_level(
    *expressions: str | PreTokenizer, ignore_merges: bool = False, begins: bool = False, also: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits by these regular expressions, or steps; with a token before each text if it
    `begins`, and `also` with these special tokens."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps: list[Any] = [split(each) if isinstance(each, str) else each for each in expressions]
    if not any(isinstance(each, pre_tokenizers.ByteLevel) for each in steps):
        steps.append(pre_tokenizers.ByteLevel(False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=SIZE - 10, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|begin|>", "<|endoftext|>", *also)])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    steps = [processors.ByteLevel(trim_offsets=False)]
    if begins:
        begin = ("<|begin|>", made.token_to_id("<|begin|>"))
        pair = "<|begin|> $A <|begin|> $B"
        steps.append(processors.TemplateProcessing(single="<|begin|> $A", pair=pair, special_tokens=[begin]))
    made.post_processor = processors.Sequence(steps)
    first = {"bos_token": "<|begin|>"} if begins else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>", chat_template=TEMPLATE, **first)


def sentencepiece(*, prefix: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE, with a token for each byte, and a space before each text if there is a `prefix`."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=SIZE - 10, special_tokens=first))
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(saved))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pair = "<s> $A <s> $B"
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair=pair, special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def files(tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, bytes]:
    """What it is saved as."""
    tokenizer.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}
