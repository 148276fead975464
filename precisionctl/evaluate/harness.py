"""lm-eval's tasks on a checkpoint, in the precision that it is stored in (extra `lm-eval`).

`StoredModel` implements `TemplateLM` of lm-eval 0.4: log-likelihoods of continuations and of whole texts, and greedy
generation.
"""

import re
import traceback
from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precisionctl.checkpoints.base import Reader
from precisionctl.errors import DataError, EnvironmentProblem, meant
from precisionctl.evaluate.measure import best_device
from precisionctl.evaluate.stored import load
from precisionctl.tokens.tokenizer import Tokenizer, open_tokenizer
from precisionctl.trainer.model.computes import longest_text
from precisionctl.trainer.model.gpt import GPT
from precisionctl.untrusted.safe_json import parse_json

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise EnvironmentProblem(
        f"--tasks needs lm-eval, which is not installed: {error}", do="pip install 'precisionctl[lm-eval]'"
    ) from None

NEW_TOKENS = 256
"""Tokens to generate if the task does not give `max_gen_toks`."""

Scored = tuple[float, bool]
"""The log-likelihood of a continuation, and whether greedy decoding gives it."""


class StoredModel(TemplateLM):  # type: ignore[misc]  # lm-eval is untyped
    """A model and its tokenizer behind lm-eval's interface, as its own `hf` model (lm_eval/models/huggingface.py) is.
    `longest` is the most tokens of a text; `ends` are tokens that end a generated one beside the tokenizer's own."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, longest: int, ends: Set[int]) -> None:
        super().__init__()
        self.model, self.tokenizer, self.longest, self.ends = model, tokenizer, longest, ends

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.end)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.begin is None else self.tokenizer.begin

    @cached_property
    def _prefix(self) -> str:
        return self.tokenizer.decode([self.prefix_token_id])

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.key

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; one that begins as texts do, as by a chat template, gets no second token for that."""
        if add_special_tokens is None and string.startswith(self._prefix):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.render(chat_history, **options)
        except DataError:
            without = [message for message in chat_history if message["role"] != "system"]
            if without == chat_history:
                raise
            return self.tokenizer.render(without, **options)  # as many templates know no system's message

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Scored]:
        return [self._scored(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.longest, 1)
            found.append(sum(self._scored(*make_disjoint_window(window))[0] for window in windows))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._generated(*request.args) for request in requests]

    def _scored(self, context: list[int], continuation: list[int]) -> Scored:
        """The log-likelihood of `continuation` after `context`, both token ids. Only the last tokens are used if both
        together are longer than the model allows."""
        tokens = (context + continuation)[-(self.longest + 1) :]
        count = min(len(continuation), len(tokens) - 1)
        logs = F.log_softmax(self._logits(tokens[:-1], count), -1)
        labels = torch.tensor(tokens[-count:], device=logs.device)
        total = logs.gather(1, labels[:, None]).double().sum()
        return float(total), bool((logs.argmax(1) == labels).all())

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        """A text generated greedily, without a KV cache: each token is a forward pass over all tokens before it. Raises
        DataError for settings that ask for sampling."""
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise DataError("a task generates text by sampling", do="Choose tasks that decode greedily.")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        count = min(int(settings.get("max_gen_toks", NEW_TOKENS)), self.longest - 1)
        tokens, text = self.tok_encode(context)[-(self.longest - count) :], ""
        start = len(tokens)
        for _ in range(count):
            following = int(self._logits(tokens, 1).argmax())
            if following == self.eot_token_id or following in self.ends:
                break
            tokens.append(following)
            text = self.tokenizer.decode(tokens[start:])
            if any(stop in text for stop in stops):
                break
        text = self.tokenizer.decode(tokens[start:], skip_special_tokens=True)
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends)] if ends else text

    def _logits(self, tokens: list[int], count: int) -> Tensor:
        """The logits at the last `count` tokens, FP32 `[count, vocab_size]`."""
        # At the right, where causal attention does not see it. An amax of all rows does, so it is a token of the text.
        padding = tokens[-1:] * (-len(tokens) % self.model.precision.alignment)
        row = torch.tensor([tokens + padding], device=self.model.output_weight.device)
        mask = (torch.arange(row.shape[1], device=row.device) < len(tokens)).unsqueeze(0)
        with torch.no_grad():
            hidden = self.model.hidden(row, mask)[0, len(tokens) - count : len(tokens)]
            return self.model.logits(hidden)[:, : self.model.model.vocab_size].float()


def run_tasks(reader: Reader, tasks: Sequence[str], *, limit: int | None, chat_template: bool) -> dict[str, Any]:
    """Run lm-eval's tasks, given by name or YAML file, on a checkpoint, with at most `limit` examples of each, and with
    `chat_template` as conversations. Returns the `precision` in words, lm-eval's `results` by task, and `samples`, the
    number of examples by task.

    Raises DataError for a task that is not known, before the model is loaded, and for one that does not load or run."""
    files = {task: _name_in(Path(task)) for task in tasks if task.endswith((".yaml", ".yml"))}
    names = [files.get(task, task) for task in tasks]
    manager = TaskManager(include_path=sorted({str(Path(file).parent) for file in files}) or None)
    known = set(manager.all_tasks)
    if unknown := next((name for name in names if name not in known), None):
        do = f"{meant(unknown, known)} See `lm-eval ls tasks` for the names of tasks.".strip()
        raise DataError(f"lm-eval knows no task {unknown!r}", do=do)
    with open_tokenizer(reader.companions, reader.path) as tokenizer:
        tokenizer.check()
        model, precision = load(reader, best_device())
        # generation_config.json says at which tokens a text ends, such as those that end a turn
        said = reader.companions.files.get("generation_config.json")
        end = parse_json(said, "generation_config.json").get("eos_token_id") if said is not None else None
        ends = frozenset(token for token in (end if isinstance(end, list) else [end]) if type(token) is int)
        adapter = StoredModel(model, tokenizer, longest_text(reader.model), ends)
        settings = {"limit": limit, "apply_chat_template": chat_template}
        try:
            found = simple_evaluate(adapter, tasks=names, task_manager=manager, log_samples=False, **settings)
        except (ValueError, KeyError, OSError, TypeError, AssertionError) as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if any(frame.f_code is StoredModel._logits.__code__ for frame in frames):
                raise  # it is the model's here, and not lm-eval's or a task's
            raise DataError(f"lm-eval: {error}", do="See `lm-eval ls tasks` for its names.") from None
    return {"precision": precision, "results": found["results"], "samples": found["n-samples"]}


def _name_in(file: Path) -> str:
    """The name of the task that a YAML file defines; lm-eval itself parses the file. Raises DataError for a file that
    cannot be read or has no `task:`."""
    try:
        named = re.search(r"^task:\s*['\"]?([\w.-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot be read: {error}", where=file) from None
    if named is None:
        raise DataError("no `task:` in it", where=file, do="Give a file of YAML that lm-eval reads as a task.")
    return named[1]
