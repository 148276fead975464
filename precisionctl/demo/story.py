"""The commands of the demo: every step after the model is made is a `precisionctl` command as a user runs it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precisionctl.demo.model import make_checkpoint
from precisionctl.demo.text import write_text
from precisionctl.errors import DestinationExists, PrecisionctlError

RECIPE = """\
[train]
batch_size = 16
micro_batch_size = 16

[data]
path = "text/train"
sequence_length = 128

[optimizer]
lr = 2e-3

[schedule]
kind = "constant"
warmup_steps = 20
"""

START, BRANCH, DECAY, ON, SFT = 150, 280, 60, 30, 40
"""Steps: last step of the common BF16 run; last step of the branches, and how many of theirs the rate decays in; length
of the runs from weights alone; length of the fine-tuning."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class CommandRun:
    """A command that was run in the demo's folder: its line, its `output` on stdout, its exit `code`, and the
    `seconds` that it took."""

    line: str
    output: str
    code: int
    seconds: float

    @property
    def result(self) -> Any:
        """The result that it printed with `--json`."""
        return json.loads(self.output)


@dataclass(frozen=True)
class Shell:
    """Runs `precisionctl` in a folder, and shows each command line and its output. `ran` lists the runs."""

    folder: Path
    say: Say
    ran: list[CommandRun] = field(default_factory=list)

    def __call__(self, line: str, *, may_differ: bool = False) -> CommandRun:
        """Run a command line (split at spaces). Raises PrecisionctlError if it fails; with `may_differ`, exit code 1 is
        a result, not a failure."""
        self.say("")
        self.say(f"$ precisionctl {line}")
        start = time.perf_counter()
        command = [sys.executable, "-m", "precisionctl", *line.split()]
        done = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        ran = CommandRun(f"precisionctl {line}", done.stdout, done.returncode, time.perf_counter() - start)
        if "--json" not in line:
            for told in ran.output.splitlines():
                self.say(told)
        if ran.code != 0 and not (may_differ and ran.code == 1):
            raise PrecisionctlError(f"`{ran.line}` ended with {ran.code}", where=self.folder, do="See its error above.")
        self.ran.append(ran)
        return ran


@dataclass(frozen=True)
class DemoResults:
    """The runs of commands whose results the report shows.

    there: `verify` after Hugging Face to Megatron. gaps: `compare` of the runs' losses. state: `verify --fp8` after
    Megatron to Hugging Face and back. last_bit: `verify --fp8` of the runs that continued from there and from the
    checkpoint itself. rules, codes: `verify` of the export by vLLM's rules, and of its codes. perplexity: `eval` by
    folder. ran: all commands.
    """

    there: CommandRun
    gaps: CommandRun
    state: CommandRun
    last_bit: CommandRun
    rules: CommandRun
    codes: CommandRun
    perplexity: dict[str, CommandRun]
    ran: Sequence[CommandRun]


def prepare(folder: Path, say: Say) -> None:
    """Write text, tokenizer, random model and recipe into `folder`. Raises DestinationExists if it exists."""
    if folder.exists():
        raise DestinationExists("a demo was run there", where=folder, do="Remove it or choose another --out.")
    folder.mkdir(parents=True)
    text = write_text(folder / "text")
    make_checkpoint(folder / "hf", text.train, seed=0)
    (folder / "demo.toml").write_text(RECIPE, encoding="utf-8")
    say("Made from Python's standard library: text/train, text/held-out, text/chats.jsonl; a tokenizer of their words")
    say("and a random Llama of 2.4 million parameters in hf/; the settings of all runs in demo.toml.")


def run(folder: Path, say: Say) -> DemoResults:
    """Run every command of the demo in `folder`, which `prepare` has made."""
    shell = Shell(folder, say)
    shell("convert hf megatron --to megatron")
    there = shell("verify hf megatron --json", may_differ=True)

    # BF16 pretraining, and three branches that continue it with the optimizer on the same data: in BF16, in FP8 seeded
    # by warm-up, and in FP8 from a cold start. In their last steps the learning rate decays: at a high one, the final
    # perplexity is a matter of chance
    run_to = "--recipe demo.toml --out"
    shell(f"resume megatron --precision bf16 {run_to} start {_to(START)}")
    decay = f"--set schedule.kind=wsd --set schedule.decay_steps={DECAY}"
    for branch, how in (("bf16", "bf16"), ("fp8", "fp8"), ("fp8-cold", "fp8 --cold-start")):
        shell(f"resume start --precision {how} {run_to} {branch} {_to(BRANCH)} {decay}")
    gaps = shell("compare bf16 fp8 fp8-cold --json")

    # the FP8 checkpoint to Hugging Face and back, and training from the result and from the checkpoint itself
    shell("convert fp8 fp8-hf --to hf")
    shell("convert fp8-hf fp8-back --to megatron --precision fp8")
    state = shell("verify fp8 fp8-back --fp8 --json", may_differ=True)
    run_on = f"--load weights --recipe demo.toml {_to(ON)} --out"
    shell(f"resume fp8-back --precision fp8 {run_on} fp8-on")
    shell(f"resume fp8 --precision fp8 {run_on} fp8-straight-on")
    shell(f"resume bf16 --precision bf16 {run_on} bf16-on")
    last_bit = shell("verify fp8-on fp8-straight-on --fp8 --json", may_differ=True)

    shell(f"resume fp8 --precision bf16 --recipe demo.toml --load weights --data text/chats.jsonl --out sft {_to(SFT)}")
    shell("inspect fp8")
    shell("export-inference fp8 fp8-vllm --target vllm")
    rules = shell("verify fp8-vllm --target vllm --json", may_differ=True)
    codes = shell("verify fp8 fp8-vllm --json", may_differ=True)
    held_out = "--data text/held-out --sequence-length 128 --json"
    perplexity = {name: shell(f"eval {name} {held_out}") for name in ("bf16", "fp8", "fp8-vllm")}
    return DemoResults(there, gaps, state, last_bit, rules, codes, perplexity, shell.ran)


def _to(steps: int) -> str:
    return f"--set train.steps={steps}"
