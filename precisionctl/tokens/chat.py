"""Tokenize conversations with a chat template, and find the tokens that the assistant says.

If the template marks them itself (`{% generation %}`), the marks are used. Otherwise they are found by comparing texts:
what the template adds to the text for an assistant message is that message.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from precisionctl.errors import DataError
from precisionctl.tokens.samples import SPOKEN, Completion, Conversation, Message
from precisionctl.tokens.wire import IDS

_DAY = datetime(2024, 7, 26)
_CODES = ["%" + letter for letter in "aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZ"] + [
    "%-" + letter for letter in "dHIjmMSUWy"
]
_PERCENT = "\ufdef"
_FIXED_CLOCK = (
    f"{{% macro strftime_now(format) %}}{{% set made = format | replace('%%', '{_PERCENT}')"
    + "".join(f" | replace('{code}', '{_DAY.strftime(code)}')" for code in _CODES)
    + " %}{% if '%' in made %}{{ raise_exception('a date of an unknown format: ' ~ format) }}{% endif %}"
    + f"{{{{ made | replace('{_PERCENT}', '%') }}}}{{% endmacro %}}{{{{ '' }}}}"
)
"""Templates that print the date get a fixed day, Llama 3.1's own fallback, so that a run that is resumed tomorrow sees
the same tokens. It is prepended to the template, as transformers passes no function of ours to it."""


_COMPARE = "Compare the checkpoint's chat template with that of the model that it comes from."

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_NONCHARACTERS = [chr(number) for number in range(0xFDD0, 0xFDF0)]
"""Unicode keeps them for a program's own use; no text has them."""


@dataclass(frozen=True)
class ChatRow:
    """Token ids, of dtype IDS, and whether each is learned, bool; both `[tokens]`. `unprinted` are keys of the
    conversation of which the template prints nothing, but for those that have been told."""

    tokens: NDArray[np.uint32]
    learned: NDArray[np.bool_]
    unprinted: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template (Jinja) of a tokenizer, and its special tokens."""

    source: str
    special_tokens: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, where: str) -> "ChatTemplate":
        """The template of a tokenizer that transformers chooses for a conversation: `tool_use`, if it has one of that
        name, for one with `tools`. Raises DataError if it has none for it; `where` is the data that needs it."""
        try:
            return cls(
                tokenizer.get_chat_template(tools=list(tools) if tools is not None else None),
                tokenizer.special_tokens_map,
            )
        except ValueError:
            names = sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []
            if names:
                what = f"none of the chat templates of the checkpoint's tokenizer is the default: {', '.join(names)}"
                do = "Copy the one that you want as chat_template.jinja beside the tokenizer."
                raise DataError(what, where=where, do=do) from None
            raise DataError(
                "the checkpoint's tokenizer has no chat template, which says how a conversation becomes text",
                where=where,
                do="Copy chat_template.jinja of the chat model whose form you want beside the tokenizer; or give "
                "`prompt` and `completion` in place of `messages`.",
            ) from None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the assistant's words are found."""
        how = "they were found by what each message adds to the text"
        return () if self.marks else (f"the chat template marks no assistant words itself; {how}",)

    @property
    def marks(self) -> bool:
        """Whether the template marks the assistant's words itself."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], chat: Conversation, where: str, *, prompt: bool = False) -> str:
        """Some messages of a conversation as text. `prompt` adds what comes before a reply. Raises DataError if the
        template fails."""
        source = _FIXED_CLOCK + self.source if "strftime_now" in self.source else self.source
        options = {**self.special_tokens, "add_generation_prompt": prompt, "tools": chat.tools}
        made: Any  # annotated as a string in transformers, and a pair in fact
        try:
            made = render_jinja_template([list(messages)], chat_template=source, **options)
        except TemplateSyntaxError as error:
            what = f"the chat template is no Jinja: {error} (its line {error.lineno})"
            raise DataError(what, where=where, do="Mend chat_template.jinja, or copy it again.") from None
        except Exception as error:  # a template is a program (in a sandbox) and may raise anything
            problem = str(error) or type(error).__name__
            own = "These are the template's own words: change the conversation, or the template (chat_template.jinja)."
            do = own if isinstance(error, TemplateError) else _COMPARE
            raise DataError(f"the chat template refuses {str(messages)[:80]}: {problem}", where=where, do=do) from None
        texts, _ = made
        return str(texts[0])

    def marked(self, text: str, chat: Conversation, where: str) -> list[tuple[int, int]]:
        """The spans of characters that the template marks in `text`, the whole conversation. Where they begin and end
        it prints a character that the text has not: transformers counts what has been printed when a mark is met,
        which is less where a macro or `{% set %}` prints later. Raises DataError if its text is another one then."""
        free = [mark for mark in _NONCHARACTERS if mark not in text]
        if len(free) < 2:
            what = "the conversation has the noncharacters U+FDD0 to U+FDEF, which mark what is learned"
            raise DataError(what, where=where, do="Leave them out: Unicode has them for no text.")
        begin, end, *_ = free
        printing = _GENERATION.sub(
            lambda tag: f'{{%{tag[1]} print "{end if tag[2] else begin}" {tag[3]}%}}', self.source
        )
        shown = replace(self, source=printing).render(chat.messages, chat, where)
        pieces = re.split(f"([{begin}{end}])", shown)
        if "".join(pieces[::2]) != text or pieces[1::2] != [begin, end] * (len(pieces) // 4):
            raise DataError(
                "the chat template changes what it marks, so the assistant's text cannot be found",
                where=where,
                do="Put {% generation %} ... {% endgeneration %} where that text is printed, and not into what a "
                "filter changes.",
            )
        ends = list(accumulate(len(piece) for piece in pieces[::2]))
        return list(zip(ends[:-1:2], ends[1::2], strict=True))


def chat_row(
    chat: Conversation,
    template: ChatTemplate,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    told: Container[str],
) -> ChatRow:
    """The tokens of a conversation. Whether the template prints keys that are `told` already is not looked at. Raises
    DataError if the template fails, or it cannot be found out which words are the assistant's."""
    _require_places(tokenizer)
    text = template.render(chat.messages, chat, where)
    require_utf8(text, where)
    _require_understood(text, chat, template, where)
    spans = template.marked(text, chat, where) if template.marks else []
    if not template.marks:
        replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant" and i >= chat.prompt]
        spans = [_added(i, text, chat, template, where) for i in replies]
    elif chat.prompt:
        prompt = template.render(chat.messages[: chat.prompt], chat, where)
        if not text.startswith(prompt):
            what = "the chat template rewrites the prompt, so its end cannot be found"
            raise DataError(what, where=where, do=_COMPARE)
        spans = [span for span in spans if span[0] >= len(prompt)]
    # Not by transformers' own mask, which marks everything after a marked span that ends in a space without a token
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    row = _row(made["input_ids"], made["offset_mapping"], spans)
    return replace(row, unprinted=tuple(_unprinted(text, chat, template, where, told)))


def _unprinted(
    text: str, chat: Conversation, template: ChatTemplate, where: str, told: Container[str]
) -> Iterator[str]:
    """`tools` and keys of SPOKEN that a conversation has, and without which it is rendered as the same `text`; but for
    those that are `told`. Each takes a rendering, as a template may print a key of some messages alone."""
    if chat.tools and "tools" not in told and _renders(text, replace(chat, tools=None), template, where):
        yield "tools"
    for key in SPOKEN:
        if key not in told and any(message.get(key) for message in chat.messages):
            without = [{name: value for name, value in message.items() if name != key} for message in chat.messages]
            if _renders(text, replace(chat, messages=without), template, where):
                yield key


def _renders(text: str, chat: Conversation, template: ChatTemplate, where: str) -> bool:
    """Whether a conversation is rendered as this text."""
    try:
        return template.render(chat.messages, chat, where) == text
    except DataError:
        return False


def _require_understood(text: str, chat: Conversation, template: ChatTemplate, where: str) -> None:
    """Raise DataError if the content of a message is not a string and the template prints its Python form, such as
    `None`, a number or a list with brackets."""
    for number, message in enumerate(chat.messages):
        content = message.get("content", "")
        if isinstance(content, str):
            continue
        as_text = [*chat.messages]
        as_text[number] = {**message, "content": str(content)}
        if _renders(text, replace(chat, messages=as_text), template, where):
            raise DataError(
                f"the chat template prints the content {str(content)[:80]} as it is",
                where=where,
                do="Give each message a string as its content, or the checkpoint a template that knows what this is.",
            )


def _require_places(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError for a tokenizer without offset mappings (tokens -> characters)."""
    if not tokenizer.is_fast:
        raise DataError(
            "the checkpoint's tokenizer does not say which characters its tokens come from",
            do="Give the checkpoint a tokenizer.json.",
        )


def completion_row(sample: Completion, tokenizer: PreTrainedTokenizerBase, where: str) -> ChatRow:
    """The tokens of a prompt and its completion: after the tokenizer's special tokens, with one end-of-text token at
    the end, which is learned. Raises DataError for text that is not UTF-8."""
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
    """Raise DataError for half a surrogate pair, which JSON can express and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        do = "It has half of a pair of surrogates: mend the text, or leave the row out."
        raise DataError(f"not UTF-8 text: {error}", where=where, do=do) from None


def _row(ids: Sequence[int], places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> ChatRow:
    """A row of token ids. Tokens whose first character is in one of the spans are learned."""
    starts = np.asarray([start for start, _ in places], np.int64)
    learned = np.zeros(len(starts), np.bool_)
    for first, last in spans:
        learned |= (starts >= first) & (starts < last)
    return ChatRow(np.asarray(ids, IDS), learned)


def _added(i: int, text: str, chat: Conversation, template: ChatTemplate, where: str) -> tuple[int, int]:
    """The span of characters in `text`, the whole conversation, that message `i` has added."""
    before = template.render(chat.messages[:i], chat, where, prompt=True)
    after = template.render(chat.messages[: i + 1], chat, where)
    if not (text.startswith(after) and after.startswith(before)):
        raise DataError(
            "the chat template rewrites earlier messages, so the assistant's text cannot be found",
            where=where,
            do="Mark them in the template with {% generation %} ... {% endgeneration %}.",
        )
    return len(before), len(after)
