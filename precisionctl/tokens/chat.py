"""Conversations as tokens, through the checkpoint's chat template, with the assistant's words marked.

A template that marks them itself (`{% generation %}`) is believed. Else they are found from the text:
what the template adds when an assistant message joins the conversation is that message.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from precisionctl.errors import DataError
from precisionctl.tokens.samples import Completion, Conversation, Message
from precisionctl.tokens.wire import IDS

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
    """Token ids, IDS, and whether each is the assistant's, bool; both `[tokens]`."""

    tokens: NDArray[np.uint32]
    learned: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer."""

    source: str
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, where: str) -> "ChatTemplate":
        """Raises DataError where there is none; `where` is what asks for it."""
        try:
            return cls(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        except ValueError as error:
            raise DataError(f"the checkpoint's tokenizer has no chat template: {error}", where=where) from None

    @property
    def notes(self) -> tuple[str, ...]:
        how = "they were found by what each message adds to the text"
        return () if self.marks else (f"the chat template marks no assistant words itself; {how}",)

    @property
    def marks(self) -> bool:
        """Whether it marks the assistant's words itself."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(
        self, messages: Sequence[Message], chat: Conversation, where: str, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Messages of a conversation as text, and the characters that the template marks in it."""
        source = _FIXED_CLOCK + self.source if "strftime_now" in self.source else self.source
        options = {**self.special_tokens, "add_generation_prompt": prompt, "tools": chat.tools}
        made: Any  # annotated as a string in transformers, and a pair in fact
        try:
            made = render_jinja_template(
                [list(messages)], chat_template=source, return_assistant_tokens_mask=self.marks, **options
            )
        except Exception as error:  # a template is a program, of which the sandbox takes away what would do harm
            problem = str(error) or type(error).__name__
            raise DataError(f"the chat template refuses {str(messages)[:80]}: {problem}", where=where) from None
        texts, marks = made
        return texts[0], marks[0] if self.marks else []


def chat_row(chat: Conversation, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, where: str) -> ChatRow:
    """Raises DataError where the template refuses the conversation, or cannot say which words are the assistant's."""
    _require_places(tokenizer)
    text, spans = template.render(chat.messages, chat, where)
    require_utf8(text, where)
    _require_understood(text, chat, template, where)
    if not template.marks:
        replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant" and i >= chat.prompt]
        spans = [_added(i, text, chat, template, where) for i in replies]
    elif chat.prompt:
        prompt, _ = template.render(chat.messages[: chat.prompt], chat, where)
        if not text.startswith(prompt):
            raise DataError("the chat template rewrites the prompt, so where it ends cannot be told", where=where)
        spans = [span for span in spans if span[0] >= len(prompt)]
    # not transformers' own mask: it marks all the rest where a marked piece ends in a space that is no token
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _row(made["input_ids"], made["offset_mapping"], spans)


def _require_understood(text: str, chat: Conversation, template: ChatTemplate, where: str) -> None:
    """Raise DataError where the content of a message is no string, and the template prints it as Python does: `None`,
    or a list of parts with its brackets."""
    for number, message in enumerate(chat.messages):
        content = message.get("content", "")
        if isinstance(content, list | dict | None) and _prints(number, str(content), text, chat, template, where):
            raise DataError(
                f"the chat template prints the content {str(content)[:80]} as it is",
                where=where,
                do="Give each message a string as its content, or the checkpoint a template that knows what this is.",
            )


def _prints(number: int, said: str, text: str, chat: Conversation, template: ChatTemplate, where: str) -> bool:
    """Whether a conversation is the same `text` where message `number` says this."""
    messages = [*chat.messages]
    messages[number] = {**messages[number], "content": said}
    try:
        return template.render(messages, chat, where)[0] == text
    except DataError:
        return False


def _require_places(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.is_fast:
        raise DataError(
            "the checkpoint's tokenizer does not say which characters its tokens come from",
            do="Give the checkpoint a tokenizer.json.",
        )


def completion_row(sample: Completion, tokenizer: PreTrainedTokenizerBase, where: str) -> ChatRow:
    """Text as it is, with what the tokenizer puts before a text and one end-of-text token, learned, behind it."""
    _require_places(tokenizer)
    text = sample.prompt + sample.completion
    require_utf8(text, where)
    made = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, places = made["input_ids"], made["offset_mapping"]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids, places = ids[:-1], places[:-1]
    end = len(text)
    return _row([*ids, tokenizer.eos_token_id], [*places, (end, end)], [(len(sample.prompt), end + 1)])


def require_utf8(text: str, where: str) -> None:
    """Raise DataError for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"not UTF-8 text: {error}", where=where) from None


def _row(ids: Sequence[int], places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> ChatRow:
    """Tokens, of which those are learned that begin in one of the spans of characters."""
    starts = np.asarray([start for start, _ in places], np.int64)
    learned = np.zeros(len(starts), np.bool_)
    for first, last in spans:
        learned |= (starts >= first) & (starts < last)
    return ChatRow(np.asarray(ids, IDS), learned)


def _added(i: int, text: str, chat: Conversation, template: ChatTemplate, where: str) -> tuple[int, int]:
    """The characters of `text`, the whole conversation, that message `i` added."""
    before, _ = template.render(chat.messages[:i], chat, where, prompt=True)
    after, _ = template.render(chat.messages[: i + 1], chat, where)
    if not (text.startswith(after) and after.startswith(before)):
        raise DataError(
            "the chat template rewrites earlier messages, so the assistant's words cannot be told apart",
            where=where,
            do="Mark them in the template with {% generation %} ... {% endgeneration %}.",
        )
    return len(before), len(after)
