"""What is tokenized other than plain text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, `role` in each, of which what the assistant says is learned.

    Nothing of the first `prompt` messages is. `tools` are those that the template is told of.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    prompt: int = 0


@dataclass(frozen=True)
class Completion:
    """Plain text of which the prompt is not learned; no template is around it."""

    prompt: str
    completion: str
