"""What a run in the tests is made of: a pico Llama with a tokenizer of 60 words, and text in those words; and what is
looked at of one that was made."""

import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pico
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from precisionctl.fp8.state import Fp8States
from precisionctl.trainer.measure.metrics import FILE, StepMetrics, read_metrics
from precisionctl.trainer.resume import Finished, Settings, Started, resume

WORDS = [f"w{number}" for number in range(60)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end> "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.save_every": 2,
    "train.eval_every": 3,
    "train.warmup_passes": 3,
    "data.sequence_length": 32,
    "optimizer.lr": 0.01,
    "schedule.warmup_steps": 2,
    "precision.delayed.amax_history_len": 4,
}

PLAIN_RECIPES = ("bf16", "fp8-block", "fp8-current", "fp8-delayed", "mxfp8", "nvfp4", "sft-bf16", "sft-fp8")
"""Those that name no model."""


def make_source(folder: Path, **settings: Any) -> Path:
    """A Hugging Face directory."""
    pico.save(folder, vocab_size=80, **settings)
    return add_tokenizer(folder, json.loads((folder / "config.json").read_text())["model_type"])


BYTE_LEVEL = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "hyperclovax_vision_v2")
"""Models whose own kind of tokenizer knows no words."""


def add_tokenizer(folder: Path, model_type: str = "") -> Path:
    """Add a tokenizer of 65 words to a directory."""
    if model_type in BYTE_LEVEL:
        characters = ["<eos>", "\u0120", *string.ascii_lowercase, *string.digits, "<", ">"]
        words = Tokenizer(models.BPE({token: number for number, token in enumerate(characters)}, []))
    else:
        names = ["<eos>", "<user>", "<assistant>", "<end>", "?", *WORDS]
        words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder


def make_text(file: Path, *, seed: int = 0, words: int = 2000) -> Path:
    """Words that tend to follow one another, so that there is something to learn."""
    pick, word, text = random.Random(seed), 0, []
    for _ in range(words):
        word = (word * 7 + 3) % 60 if pick.random() < 0.8 else pick.randrange(60)
        text.append(WORDS[word])
    file.write_text(" ".join(text))
    return file


def make_place(folder: Path) -> Path:
    """A folder with a source and texts for many tests: nothing in them changes it."""
    make_source(folder / "source")
    make_text(folder / "text.txt")
    make_text(folder / "held_out.txt", seed=1, words=300)
    return folder


def settings(source: Path, data: Path, out: Path, precision: Any = "bf16", **changes: Any) -> Settings:
    """SMALL, changed by recipe keys with `__` for the dot (`train__steps=3`) and by fields of Settings. Runs on the
    same data share its tokens: a tokenizer takes a second to start."""
    fields: Mapping[str, Any] = {key: value for key, value in changes.items() if "__" not in key}
    keys = SMALL | {"data.cache": data.parent / "tokens"}
    keys |= {key.replace("__", "."): value for key, value in changes.items() if "__" in key}
    overrides = tuple(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    )
    return Settings(source, precision, data, out, overrides=overrides, backend="emulated", **fields)


def run(made: Settings) -> tuple[Started, Finished, list[float]]:
    """Run it; also the loss of each step that it made."""
    started: list[Started] = []
    losses: list[float] = []
    finished = resume(made, started.append, lambda metrics: losses.append(metrics.loss))
    return started[0], finished, losses


def losses(out: Path) -> list[tuple[Any, ...]]:
    """Of each step what does not depend on the clock."""
    timed = ("seconds", "tokens_per_second", "tflops", "host_bytes")
    return [tuple((key, value) for key, value in row.items() if key not in timed) for row in read_metrics(out / FILE)]


def contents(folder: Path, *without: str) -> dict[str, bytes]:
    """Every file of a folder, but for some names."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in without)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def scales(states: Fp8States | None) -> dict[tuple[str, str], tuple[float, list[float]]]:
    """Scale and history by module and role."""
    assert states is not None
    return {
        (name, role): (float(part.scale), part.amax_history.tolist())
        for name, state in states.modules.items()
        for role, part in state.roles.items()
    }


class Killed(Exception):
    pass


def run_with_kills(made: Settings, steps: set[int]) -> None:
    """Run it to its end; at each of these steps it dies, with nothing saved but what was."""

    def die(step: StepMetrics) -> None:
        if step.step in steps:
            steps.remove(step.step)
            raise Killed

    while True:
        try:
            resume(made, lambda started: None, die)
            return
        except Killed:
            pass


def as_module(parameters: Mapping[str, Tensor]) -> nn.Module:
    """A module with copies of these as parameters of these names, for an optimizer."""
    made = nn.Module()
    for name, values in parameters.items():
        here, (*path, last) = made, name.split(".")
        for part in path:
            if not hasattr(here, part):
                here.add_module(part, nn.Module())
            here = here.get_submodule(part)
        here.register_parameter(last, nn.Parameter(values.clone()))
    return made
