"""Without the extras: checkpoints are converted, exported and verified; what needs a package names it and its extra."""

import subprocess
import sys
from pathlib import Path

import fp8_directories
import pico
import pytest
import repository
import torch
from command_line import run

from precisionctl import reports

EXTRAS = (
    *("transformers", "tokenizers", "jinja2", "matplotlib", "pyarrow", "zstandard"),
    *("tensorboard", "wandb", "lm_eval"),
)

CONVERTING = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS})
from precisionctl import api
api.convert(api.Request("hf", "megatron", "megatron"), workers=1)
api.convert(api.Request("megatron", "back", "hf"), workers=1)
assert api.verify("hf", "back").equal
for target in ("vllm", "sglang", "tensorrt-llm"):
    api.convert(api.Request.export("megatron", target, target, "mxfp8"), workers=1)
    assert not [found for found in api.check_target(target, target) if found.rule.fatal]
api.inspect("back")
"""


@pytest.mark.soak
def test_converting_exporting_and_verifying_need_no_extra(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    done = subprocess.run([sys.executable, "-c", CONVERTING], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "line", "words"),
    [
        ("transformers", ("eval", "hf", "--data", "text.txt"), "text needs transformers, which is not installed"),
        (
            "transformers",
            ("export-inference", "hf", "out", "--target", "transformers", "--scheme", "dynamic"),
            "a directory for transformers needs transformers",
        ),
        (
            "transformers",
            ("verify", "fp8", "--target", "transformers"),
            "a directory for transformers needs transformers",
        ),
        ("matplotlib", ("compare", "a", "b", "--png", "curves.png"), "a picture of curves needs matplotlib"),
        ("transformers", ("demo",), "the demo needs transformers"),
        (
            "zstandard",
            ("inspect", str(repository.GOLDEN / "maxtext" / "orbax")),
            "reading what is compressed with Zstandard needs zstandard",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, line: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    fp8_directories.make(tmp_path / "fp8", "compressed-channel")
    (tmp_path / "text.txt").write_text("some words\n")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.delitem(sys.modules, "precisionctl.reports.plot", raising=False)
    monkeypatch.delattr(reports, "plot", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    failed = run(*line)
    extra = {"matplotlib": "plots", "zstandard": "orbax"}.get(package, "train")
    assert failed.exit_code == 1 and words in failed.stderr and f"pip install 'precisionctl[{extra}]'" in failed.stderr
