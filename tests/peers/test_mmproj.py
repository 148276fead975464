"""Files of towers that are written for llama.cpp, beside those of its converter."""

import json
import os
import subprocess
from pathlib import Path

import environments
import gguf_towers
from repository import HELPERS

from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute

OTHERWISE = {
    # the converter writes the epsilon of the text model, which is another
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"clip.vision.attention.layer_norm_epsilon"}),
    # it passes over the activation, and llama.cpp computes another one
    "gemma4": {"clip.use_gelu"},
    # without the token that ends a row, llama.cpp does not load a file
    **dict.fromkeys(("llava", "mistral3"), {"v.token_embd.img_break"}),
    # it takes the norm before an MLP for one behind attention
    "llama4": {
        f"v.blk.{layer}.{norm}.{end}"
        for layer in range(3)
        for norm in ("ln2", "attn_post_norm")
        for end in ("weight", "bias")
    },
}


def test_files_are_byte_for_byte_what_the_converter_writes_but_for_what_is_stated(tmp_path: Path) -> None:
    cases = []
    for family in gguf_towers.TOWERS:
        published = gguf_towers.save(tmp_path / family / "Model", family)
        for kind in ("bf16", "f16"):
            execute(plan_command(Request.export(published, tmp_path / family / kind / "Model", LLAMA_CPP, kind)))
            cases.append((f"{family}/Model", f"{family}/{kind}/Model/mmproj-Model-{kind.upper()}.gguf", kind))
    python, sources = environments.llama_cpp()
    found = os.pathsep.join(map(str, (sources, sources / "gguf-py", HELPERS)))
    # optimized: of Step 3.7 the converter asserts the sizes of the release
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found, "PYTHONOPTIMIZE": "1"}
    command = [python, Path(__file__).parent / "mmproj_judge.py", tmp_path, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for file, answer in json.loads((tmp_path / "answers.json").read_text()).items():
        otherwise = OTHERWISE.get(file.partition("/")[0], set())
        assert {*answer["otherwise"]} == otherwise and answer["bytes"] == (not otherwise), (file, answer)
