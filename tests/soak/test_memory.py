"""Memory does not grow with the model: two sizes, and a model whose vocabulary is one tensor of 2 GB."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.huggingface import HuggingFaceWriter
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.dtypes import DType
from precisionctl.param import TensorSpec

LIMIT_MB = 512

SIZES = {
    "64 MB": {"vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 1024},
    "512 MB": {"vocab_size": 4096, "hidden_size": 2048, "num_hidden_layers": 11, "intermediate_size": 2048},
    "a tensor of 2 GB": {
        "vocab_size": 1 << 20,
        "hidden_size": 1024,
        "num_hidden_layers": 1,
        "intermediate_size": 1024,
        "tie_word_embeddings": True,
    },
}

CONVERT = """
import json, sys
from pathlib import Path
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
def memory(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1024
task, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
if task == "export":
    work = plan_command(Request.export(source, target, "vllm", "dynamic"))
else:
    work = plan_command(Request(source, target, task))
execute(work, workers=1)
print(json.dumps(memory("VmHWM") - before))
"""


def make(directory: Path, sizes: dict[str, int | bool]) -> None:
    """Zeros, as holes in the file: what they are does not matter here."""
    config = {
        "model_type": "llama",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        **sizes,
    }
    vocabulary, hidden, ffn = (int(sizes[key]) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(int(sizes["num_hidden_layers"])):
        block = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        block |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
        norms = {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (block | norms).items()}
    specs = {f"model.{name}.weight": TensorSpec(shape, DType.bfloat16) for name, shape in shapes.items()}
    if not sizes.get("tie_word_embeddings"):
        specs["lm_head.weight"] = TensorSpec((vocabulary, hidden), DType.bfloat16)
    directory.mkdir()
    writer = HuggingFaceWriter(directory, specs, Companions(), config)
    writer.lay_out()
    writer.finish(None)


def measure(task: str, source: Path, target: Path) -> float:
    command = [sys.executable, "-c", CONVERT, task, str(source), str(target)]
    megabytes: float = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return megabytes


@pytest.mark.parametrize("task", ["megatron", "hf", "export"])
def test_memory_is_the_same_for_every_size(tmp_path: Path, task: str) -> None:
    used = {}
    for size, sizes in SIZES.items():
        make(tmp_path / "source", sizes)
        used[size] = measure(task, tmp_path / "source", tmp_path / "target")
        if task != "export":
            assert open_checkpoint(tmp_path / "target").specs
        shutil.rmtree(tmp_path / "source")
        shutil.rmtree(tmp_path / "target")
    print(task, used)
    assert max(used.values()) < LIMIT_MB
    assert max(used.values()) < min(used.values()) + 64
