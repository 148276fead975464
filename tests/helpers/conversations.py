"""Texts and conversations in ten words, with a tokenizer and chat templates for them."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Words, models, pre_tokenizers
from tokenizing import files_of
from transformers import PreTrainedTokenizerFast

from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import IGNORED

WORDS = ["<eos>", "<user>", "<bot>", "<end>", "a", "b", "c", "d", "e", "?"]
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
MARKING_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} <end> {% else %}<bot> "
    "{% generation %}{{ m.content }} <end> {% endgeneration %}{% endif %}{% endfor %}"
)
CONVERSATION = [
    {"role": "user", "content": "a b ?"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "a"},
]


def tokenizer(template: str | None = None) -> Tokenizer:
    """One token for each of WORDS; it knows nothing else."""
    return Tokenizer(_files(template))


@cache
def _files(template: str | None) -> dict[str, bytes]:
    return files_of(with_templates(template))


def with_templates(templates: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of WORDS, with one chat template or several with names."""
    words = Words(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", chat_template=templates)


def read(ids: list[int]) -> str:
    return " ".join(WORDS[i] if i != IGNORED else "." for i in ids)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
