"""A Hugging Face checkpoint for the demo: a tokenizer trained on its text, and a small random Llama."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY = 2048
TOKENIZER_FILES = 60
"""How many files the tokenizer is trained on: enough text for a small vocabulary."""

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def make_checkpoint(folder: Path, text: Path, seed: int) -> None:
    """Write a random BF16 Llama of 2.4 million parameters with a tokenizer for the files in `text`."""
    logging.disable_progress_bar()
    tokenizer = _train_tokenizer(text)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_tokenizer(text: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(text.iterdir())[:TOKENIZER_FILES]
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8") for file in files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, chat_template=CHAT_TEMPLATE
    )
