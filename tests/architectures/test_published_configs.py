"""Published models at their own sizes: every parameter has a row, and the rows have as many as the Hub counts; of
GLM-4.5-Air, MiniMax-M2 and Qwen3-Next, where it counts prediction layers and scales too, as transformers' class has.

No weights: names and shapes are those of transformers' class on the meta device, of the first layers. Left out of the
published config.json are keys that no tensor and no computation depends on; the factors of longrope are made up.
"""

import dataclasses
import json
import math
from typing import Any

import pico
import pytest
import repository
import torch
from in_memory import Described
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.families import architecture_of, from_hf_config, to_hf_config
from precisionctl.checkpoints.hf_directory.fused_experts import sliced
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan

LAYERS = 4
LINES = (repository.GOLDEN / "published_configs.jsonl").read_text().splitlines()
PUBLISHED = {each["repository"]: each for each in map(json.loads, LINES)}


def parameters(model: ModelShape) -> int:
    """Elements of all rows, in the layout of Hugging Face."""
    rows = architecture_of(model.architecture).spelled({}, model)
    return sum(math.prod(row.shape(model)) * row.count(model) for row in rows if row.present.in_layout("hf", model))


def first_layers(config: dict[str, Any]) -> dict[str, Any]:
    cut = {key: min(LAYERS, config[key]) for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config}
    return config | cut | ({"layer_types": config["layer_types"][:LAYERS]} if "layer_types" in config else {})


def stored(config: dict[str, Any]) -> dict[str, TensorSpec]:
    known = {key: value for key, value in config.items() if key != "quantization_config"}
    model_type = known.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(pico.ALSO.get(model_type, model_type), **known))
    tensors = {name: TensorSpec(tuple(t.shape), DType.bfloat16) for name, t in model.state_dict().items()}
    slices = sliced({name: StoredTensor(spec, 0) for name, spec in tensors.items()}, "here")
    return {name: each.spec for name, each in slices.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_of_a_published_model_has_its_row(name: str) -> None:
    config = PUBLISHED[name]["config"]
    model = dataclasses.replace(from_hf_config(config), mtp_num_layers=0)  # which transformers' class has not
    assert parameters(model) == PUBLISHED[name]["parameters"]
    told = from_hf_config(to_hf_config(model, "bfloat16"))
    assert dataclasses.replace(told, mtp_num_layers=0) == model
    if config["model_type"] in {its.get("model_type") for its in pico.ABSENT.values()}:
        pytest.skip("this transformers has no class of it")
    cut = first_layers(config)
    plan = make_plan(Described(from_hf_config(cut), stored(cut)), "megatron")
    assert plan.model.num_layers == min(LAYERS, model.num_layers) and plan.jobs


def test_the_first_llama_spells_its_context_otherwise() -> None:
    config = PUBLISHED["meta-llama/Llama-2-7b-hf"]["config"]
    older = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    assert from_hf_config(older | {"max_sequence_length": 4096}) == from_hf_config(config)
