"""Which of several config groups counts for a linear, as compressed-tensors itself chooses it; and what is missing of
what a group says."""

import json
import random
from pathlib import Path

import four_bit_directories
import pytest
import torch
from installed import judge, need_loader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules.config_groups import Targets
from precisionctl.verify.engine_rules import check

LAYER = "model.layers.0"
MODULES = [f"{LAYER}.self_attn.{part}_proj" for part in "qkvo"]
MODULES += [f"{LAYER}.mlp.{part}_proj" for part in ("gate", "up", "down")]
PATTERNS = ["re:.*self_attn.*", "re:.*mlp.*", r"re:.*\.(q|k)_proj$", r"re:.*\.q_proj", "re:.*_proj", "re:.*layers.*"]


def test_a_target_is_chosen_as_compressed_tensors_chooses_it() -> None:
    match_targets = judge("compressed_tensors.utils.match").match_targets
    draw, linear, without = random.Random(0), torch.nn.Linear(1, 1), 0
    for _ in range(500):
        targets = draw.sample(["Linear", *MODULES, *PATTERNS], draw.randint(1, 5))
        ours = Targets(targets, set(MODULES), fuses=False)
        for module in MODULES:
            assert ours.of(module) == next(iter(match_targets(module, linear, targets)), None), (targets, module)
            without += ours.of(module) is None
    assert 0.1 < without / (500 * len(MODULES)) < 0.9


@pytest.mark.parametrize("groups", [1, 2])
def test_a_missing_scale_of_inputs_is_found_in_the_group_that_says_it(tmp_path: Path, groups: int) -> None:
    """NVFP4, whose inputs have a global scale; the same with MLPs whose inputs stay as they are."""
    four_bit_directories.make(tmp_path, "ct-nvfp4")
    path, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    config = json.loads(path.read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    if groups == 2:
        both = {"group_1": group | {"targets": ["re:.*mlp.*"], "input_activations": None}, "group_0": group}
        config["quantization_config"]["config_groups"] = both
        tensors = {name: each for name, each in tensors.items() if not (".mlp." in name and "input_" in name)}
    config["quantization_config"]["quantization_status"] = "compressed"
    path.write_text(json.dumps(config))
    missing = f"{LAYER}.self_attn.o_proj.input_global_scale"
    for removed in (False, True):
        if removed:
            del tensors[missing]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for engine in ("vllm", "sglang", "transformers"):
            found = check(open_checkpoint(tmp_path), engine_named(engine))
            named = [each.where for each in found if "no scale of inputs" in each.what and each.rule.fatal]
            assert named == [f"{LAYER}.self_attn.o_proj.weight"] * removed
            assert removed or engine != "transformers" or not any(each.rule.fatal for each in found)
    need_loader(tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert set(info["missing_keys"]) == {missing}
