"""A static export from training state against llm-compressor's calibrated one, of the same weights, on held-out text.

    make demo
    python benchmarks/peers/static.py --demo demo-run --python .peers/llmcompressor/bin/python

The demo trains a Llama of 2.4 million parameters in FP8; its checkpoints have recorded every input, where ours gets
its scales. llm-compressor quantizes the same weights in BF16 with its preset FP8, calibrated on rows of the text that
the model was trained on. Both are evaluated as an engine would compute, against the BF16 weights, on text that neither
has seen: by `precisionctl eval`, and by transformers, which simulates compressed-tensors by itself. Ours again under
input scales that only move the grid says how much of a difference is the luck of rounding.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEQUENCE_LENGTH = 128
SEED = 0


def child(source: str, target: str, rows: str) -> None:
    """llm-compressor's oneshot, with rows of tokens out of a JSON file."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = json.loads(Path(rows).read_text())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]}),
        processor=AutoTokenizer.from_pretrained(source),
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
        num_calibration_samples=len(tokens),
        max_seq_length=SEQUENCE_LENGTH,
    )
    model.save_pretrained(target, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def calibration_rows(source: Path, text: Path, count: int) -> list[list[int]]:
    """So many rows of the training text, drawn at random."""
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.tokens.tokenizer import Tokenizer
    from precisionctl.trainer.data import load_rows

    rows = load_rows(text, Tokenizer(open_checkpoint(source).companions.files), SEQUENCE_LENGTH)
    numbers = random.Random(SEED).sample(range(len(rows)), min(count, len(rows)))
    return [rows.pieces(number)[0].tokens[:-1].tolist() for number in numbers]


def judged(export: Path, source: Path, text: Path) -> dict[str, float]:
    """Perplexity, KL divergence in nats and top-1 agreement: ours, and transformers'."""
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.evaluate import evaluate

    found = evaluate(
        open_checkpoint(export), text, against=open_checkpoint(source), sequence_length=SEQUENCE_LENGTH, device="cpu"
    )
    assert found.against is not None
    numbers = {"perplexity": found.perplexity, "kl": found.against.kl, "top1": found.against.top1}
    numbers["perplexity_of_the_source"] = found.against.perplexity
    return numbers | {f"transformers_{name}": value for name, value in simulated(export, source, text).items()}


def simulated(export: Path, source: Path, text: Path, batch: int = 16) -> dict[str, float]:
    """The same by transformers' own models: compressed-tensors rounds inputs of linears to FP8 and back."""
    import torch
    from transformers import AutoModelForCausalLM

    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.tokens.tokenizer import Tokenizer
    from precisionctl.trainer.data import load_rows

    rows = load_rows(text, Tokenizer(open_checkpoint(source).companions.files), SEQUENCE_LENGTH)
    stored, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (export, source))
    loss = kl = 0.0
    count = 0
    for start in range(0, len(rows), batch):
        made = rows.batch(range(start, min(start + batch, len(rows))))
        with torch.no_grad():
            logs = [model(made.tokens).logits.float().log_softmax(-1) for model in (stored, reference)]
        loss -= float(logs[0].gather(-1, made.labels[..., None]).sum())
        kl += float((logs[1].exp() * (logs[1] - logs[0])).sum())
        count += made.labels.numel()
    return {"perplexity": float(torch.tensor(loss / count).exp()), "kl": kl / count}


FACTORS = [2 ** (1 + quarter / 4) for quarter in range(4)]
"""Input scales times a power of two leave every rounding where it was, short of the smallest and largest values; times
another number they only move the grid. What they change is the luck of rounding, beside which a difference between two
exports has to be seen."""


def shifted(export: Path, factor: float, target: Path) -> Path:
    """A copy of an export whose input scales are so many times larger."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(export, target)
    stored = load_file(target / "model.safetensors")
    larger = {name: scale * factor for name, scale in stored.items() if name.endswith(".input_scale")}
    save_file(stored | larger, target / "model.safetensors", metadata={"format": "pt"})
    return target


def measure(run: Path, text: Path, python: Path, count: int, scratch: Path) -> dict[str, Any]:
    """Both exports of a run's newest checkpoint."""
    names = ("ours", "in-bf16", "bf16", "theirs", "rows.json")
    ours, in_bf16, source, theirs, rows = (scratch / name for name in names)
    for words in (
        ("convert", run, source, "--to", "hf", "--precision", "bf16"),
        ("export-inference", run, ours, "--target", "vllm", "--scheme", "static"),
        ("export-inference", run, in_bf16, "--target", "transformers", "--scheme", "static"),
    ):
        subprocess.run([sys.executable, "-m", "precisionctl", *words], check=True, stdout=subprocess.DEVNULL)
    rows.write_text(json.dumps(calibration_rows(source, text / "train", count)))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(each) for each in (python, __file__, "--child", source, theirs, rows)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    exports = {"ours": ours, "ours for transformers": in_bf16, "theirs": theirs}
    exports |= {f"ours times {factor:.2f}": shifted(ours, factor, scratch / str(factor)) for factor in FACTORS}
    return {name: judged(export, source, text / "held-out") for name, export in exports.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo-run"))
    parser.add_argument("--python", type=Path, default=Path(".peers/llmcompressor/bin/python"))
    parser.add_argument("--rows", type=int, default=512, help="that llm-compressor is calibrated on")
    parser.add_argument("--runs", nargs="+", default=["fp8", "fp8-cold", "fp8-on"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/static.json"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "rows": options.rows, "runs": {}}
    for name in options.runs:
        with tempfile.TemporaryDirectory() as scratch:
            made = measure(
                options.demo / name, options.demo / "text", options.python.absolute(), options.rows, Path(scratch)
            )
        print(name, json.dumps(made), flush=True)
        found["runs"][name] = made
    options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
