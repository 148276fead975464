"""Conversations as tokens, through the checkpoint's chat template, with the assistant's words marked.

A template that marks them itself (`{% generation %}`) is believed. Else they are found from the text:
what the template adds when an assistant message joins the conversation is that message.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from precisionctl.errors import DataError
from precisionctl.trainer.bounded import bounded

Conversation = Sequence[dict[str, Any]]

SECONDS, MEMORY = 10.0, 1 << 30
"""What a template may take for one conversation: a stranger's program, and one without an end is easily written."""

_DAY = datetime(2024, 7, 26)
_FIXED_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{letter}', '{_DAY.strftime('%' + letter)}')" for letter in "aAdbBmyYHMS")
    + " }}{% endmacro %}{{ '' }}"
)
"""Templates that print the date get one day, Llama 3.1's own fallback: a run resumed tomorrow must see the same
tokens. Written into the template, because transformers lets no function of ours through to it."""


@dataclass(frozen=True)
class ChatRow:
    """Token ids, int32, and whether each is the assistant's, bool; both `[tokens]`."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]


def chat_rows(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, where: Path
) -> tuple[list[ChatRow], list[str]]:
    """One row for each conversation, and notes on how they were made.

    Raises DataError where there is no template, or where it cannot say which words are the assistant's.
    """
    try:
        template = _Template(tokenizer.get_chat_template(), tokenizer.special_tokens_map, where)
    except ValueError as error:
        raise DataError(f"the checkpoint's tokenizer has no chat template: {error}", where=where) from None
    note = "the chat template marks no assistant words itself; they were found by what each message adds to the text"
    return [_row(messages, template, tokenizer) for messages in conversations], [] if template.marks else [note]


@dataclass(frozen=True)
class _Template:
    source: str
    special_tokens: Mapping[str, Any]
    where: Path

    @property
    def marks(self) -> bool:
        """Whether it marks the assistant's words itself."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(self, messages: Conversation, *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters that the template marks in it."""
        source = _FIXED_CLOCK + self.source if "strftime_now" in self.source else self.source
        options = {**self.special_tokens, "add_generation_prompt": prompt}
        made: Any  # annotated as a string in transformers, and a pair in fact
        try:
            with bounded(SECONDS, MEMORY):
                made = render_jinja_template(
                    [list(messages)], chat_template=source, return_assistant_tokens_mask=self.marks, **options
                )
        except Exception as error:  # a template is a program, of which the sandbox takes away what would do harm
            raise DataError(f"the chat template refuses {str(messages)[:80]}: {error}", where=self.where) from None
        texts, marks = made
        return texts[0], marks[0] if self.marks else []

    def added(self, messages: Conversation, i: int, text: str) -> tuple[int, int]:
        """The characters of `text`, all of `messages`, that message `i` added."""
        before, _ = self.render(messages[:i], prompt=True)
        after, _ = self.render(messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                "the chat template rewrites earlier messages, so the assistant's words cannot be told apart",
                where=self.where,
                do="Mark them in the template with {% generation %} ... {% endgeneration %}.",
            )
        return len(before), len(after)


def _row(messages: Conversation, template: _Template, tokenizer: PreTrainedTokenizerBase) -> ChatRow:
    text, spans = template.render(messages)
    if not template.marks:
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [template.added(messages, i, text) for i in replies]
    # not transformers' own mask: it marks all the rest where a marked piece ends in a space that is no token
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.asarray([start for start, _ in made["offset_mapping"]])
    learned = np.zeros(len(starts), np.bool_)
    for first, last in spans:
        learned |= (starts >= first) & (starts < last)
    return ChatRow(np.asarray(made["input_ids"], np.int32), learned)
