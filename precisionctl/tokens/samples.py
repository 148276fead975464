"""Conversations and completions, the samples that are tokenized other than plain text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

SPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message, beside `content`, under which an assistant says something."""


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, each with a `role`. What the assistant says is learned, except in the first
    `prompt` messages. `tools` are passed to the template."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, without a chat template. Only the completion is learned."""

    prompt: str
    completion: str
