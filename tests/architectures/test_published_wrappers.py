"""Published models of images at their own sizes: every tensor is text or tower, every one of the text has its row, and
all together are as many parameters as the Hub counts, but for GLM-5.3's prediction layer, which transformers' class has
not.

Names and shapes are those of transformers' class on the meta device. The configurations and the Hub's counts are from
memory, without keys that no tensor depends on; transformers' class, made of such a configuration, has that count.
"""

import json
import math

import pytest
import repository
import torch
from in_memory import Described
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from precisionctl.architectures.families import read_model
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.hf_directory.fused_experts import sliced
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor
from precisionctl.dtypes import DType
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.planning.make_plan import make_plan

LINES = (repository.GOLDEN / "published_wrappers.jsonl").read_text().splitlines()
PUBLISHED = {each["repository"]: each for each in map(json.loads, LINES)}


FIRST = ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.soak]) for name in PUBLISHED]
)
def test_every_parameter_of_a_published_wrapper_is_planned(name: str) -> None:
    config = PUBLISHED[name]["config"]
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers has no class of it")
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    tied = {"lm_head.weight"} if theirs.config.tie_word_embeddings else set()
    tensors = {name: TensorSpec(tuple(t.shape), DType.bfloat16) for name, t in theirs.state_dict().items()}
    slices = sliced({name: StoredTensor(spec, 0) for name, spec in tensors.items() if name not in tied}, "here")
    specs = {name: each.spec for name, each in slices.items()}
    model = read_model(config, "config.json", specs)
    plan = make_plan(Described(model, specs), "megatron", parallelism=Parallelism(tensor=4))
    padding = (1 if model.tied_embeddings else 2) * (plan.model.padded_vocab_size - model.vocab_size)
    planned = sum(math.prod(spec.shape) for spec in plan.targets.values()) - padding * model.hidden_size
    assert planned == sum(math.prod(spec.shape) for spec in specs.values()) == PUBLISHED[name]["parameters"]
    assert plan.model.wrapper and any(target.startswith(TOWERS) for target in plan.targets)
