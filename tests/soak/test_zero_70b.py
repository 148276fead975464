"""A Llama 3 70B of 64 ranks of ZeRO 3, 789 GB as holes in files: what it takes to plan what becomes of it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from precisionctl.checkpoints.torch_files.torch_zip_writer import Blank, lay_out
from precisionctl.dtypes import DType

RANKS, GROUP = 64, 1_000_000_000
"""DeepSpeed's default of elements in a group of parameters on a rank (`sub_group_size`)."""

SECONDS, MEGABYTES = 20, 300
"""Of the CPU, whose other half may be busy; and all of the process. Measured: 1 s, 52 MB."""

PLAN = """
import json, resource, sys
from pathlib import Path
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
source, to, options = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
command = plan_command(Request(source, source.with_name("out"), to, **options))
used, status = resource.getrusage(resource.RUSAGE_SELF), Path("/proc/self/status").read_text()
kilobytes = int(status.partition("VmHWM:")[2].split()[0])  # ru_maxrss counts what the parent had
print(json.dumps([command.plan.nbytes, used.ru_utime + used.ru_stime, kilobytes // 1024]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zero") / "run"
    directory = root / "global_step100"
    directory.mkdir(parents=True)
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8, architectures=["LlamaForCausalLM"])
    config.save_pretrained(root)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    counts = [0]
    for name, parameter in model.named_parameters():
        each = math.ceil(parameter.numel() / RANKS)
        if counts[-1] + each > GROUP:
            groups.append({})
            counts.append(0)
        groups[-1][name] = tuple(parameter.shape)
        counts[-1] += each
    empty = torch.empty(0, dtype=torch.bfloat16)
    names = [name for group in groups for name in group]
    states = {"module": dict.fromkeys(names, empty), "param_shapes": groups, "global_steps": 100}
    for rank in range(RANKS):
        torch.save(states, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [
            {kind: Blank(DType.float32, (count,)) for kind in ("fp32", "exp_avg", "exp_avg_sq")} for count in counts
        ]
        moments = {n: {k: one[k] for k in ("exp_avg", "exp_avg_sq")} | {"step": 100} for n, one in enumerate(flat)}
        inner = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [one["fp32"] for one in flat]}
        inner["optimizer_state_dict"] = {"state": moments, "param_groups": [{"lr": 1e-5}]}
        archive = lay_out({"optimizer_state_dict": inner})
        archive.write_around(directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(directory.name)
    return root


@pytest.mark.parametrize(
    ("to", "options", "per_parameter"),
    [
        ("hf", "{'precision': 'bf16'}", 2),
        ("megatron", "{'precision': 'bf16'}", 14),
        ("hf", "{'container': 'deepspeed-universal'}", 12),
    ],
)
def test_a_plan_of_it_takes_seconds_and_little_memory(run: Path, to: str, options: str, per_parameter: int) -> None:
    done = subprocess.run([sys.executable, "-c", PLAN, run, to, options], check=True, capture_output=True, text=True)
    size, seconds, megabytes = json.loads(done.stdout)
    assert size == pytest.approx(70_553_706_496 * per_parameter, rel=1e-3)
    print(f"{to} {options}: {seconds:.1f} s of CPU, {megabytes} MB")
    assert seconds < SECONDS and megabytes < MEGABYTES
