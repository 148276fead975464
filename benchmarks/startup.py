"""CPU seconds and memory of commands on a tiny model, medians of seven: what every use of the program costs.

python benchmarks/startup.py
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {
    "--help": ["--help"],
    "inspect": ["inspect", "hf"],
    "inspect, Megatron": ["inspect", "megatron"],
    "convert --to hf --dry-run": ["convert", "megatron", "out", "--to", "hf", "--dry-run"],
    "convert --to hf": ["convert", "megatron", "{new}", "--to", "hf"],
    "verify": ["verify", "hf", "megatron"],
    "convert --to megatron": ["convert", "hf", "{new}", "--to", "megatron"],
}


def measured(arguments: Sequence[str], directory: Path) -> tuple[float, float]:
    """CPU seconds of a command as a whole process, and the most MB that it held."""
    command = ["/usr/bin/time", "-f", "%U %S %M", sys.executable, "-m", "precisionctl", *arguments]
    done = subprocess.run(command, check=True, cwd=directory, capture_output=True, text=True)
    user, system, kilobytes = map(float, done.stderr.split()[-3:])
    return user + system, kilobytes / 1024


def save_tiny(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).bfloat16().save_pretrained(directory)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        save_tiny(directory / "hf")
        measured(["convert", "hf", "megatron", "--to", "megatron"], directory)
        for name, command in COMMANDS.items():
            runs = [measured([each.format(new=f"{name}-{run}") for each in command], directory) for run in range(7)]
            seconds, megabytes = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{name:26} {seconds:.2f} s of CPU {megabytes:4.0f} MB")


if __name__ == "__main__":
    main()
