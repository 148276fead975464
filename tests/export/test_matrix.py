"""Every target and scheme, for a family of each kind: transformers computes what the stored codes decode to, or is said
not to; tests/peers/test_vllm.py asks vLLM's own loader the same."""

import json
import shutil
from pathlib import Path

import matrix
import pytest
import torch
from fp8_directories import decoded_by_transformers
from installed import BEFORE_5_23, need_loader
from safetensors.torch import load_file, save_file
from soaking import few
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, PreTrainedModel

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.module import LiveModel
from precisionctl.conversion.convert import convert
from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import Precision
from precisionctl.trainer.model.gpt import GPT
from precisionctl.verify.engine_rules import check

ENGINES = engines()
TOKENS = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))
AS_VALUES = {"compressed-tensors": CompressedTensorsConfig, "fp8": FineGrainedFP8Config, "mxfp8": FineGrainedFP8Config}

NEAR = 1e-3 if BEFORE_5_23 else 1e-4
"""Of compressed-tensors transformers 5.17 also takes scales of no dimension, decodes experts to BF16 whatever the
model's dtype is, and does so with MXFP8, so that it computes with that in BF16 alone."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def refusing(directory: Path) -> set[str]:
    """The engines that the checker says do not take it."""
    reader = HuggingFaceReader(directory)
    return {name for name, engine in ENGINES.items() if any(found.rule.fatal for found in check(reader, engine))}


def decoded(directory: Path) -> torch.Tensor:
    """Logits of our own model, in FP32, of what the codes decode to."""
    reader = HuggingFaceReader(directory)
    plan = make_plan(reader, "megatron", dtype=DType.float32)
    ours = GPT(plan.model, Precision(fp8=False), "emulated", torch.float32)
    convert(plan, reader, LiveModel(plan.model, dict(ours.named_parameters())))
    with torch.no_grad():
        return ours(TOKENS)[..., :250]


def in_fp32(source: Path) -> Path:
    """A copy in which what is no FP8 is FP32: transformers decodes to the dtype that it finds beside the codes."""
    directory = shutil.copytree(source, source.with_name(f"{source.name}-fp32"))
    file = directory / "model.safetensors"
    tensors = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return directory


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def problem_of_transformers(directory: Path) -> object:
    """What it does not load or computes wrongly, as users call it, where it rounds the inputs of compressed-tensors'
    linears, and where it computes with values alone; None for nothing."""
    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    as_values = AS_VALUES[method](dequantize=True) if method in AS_VALUES else None
    try:
        rounded = logits_of(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))
        wide = in_fp32(directory)
        found = logits_of(decoded_by_transformers(wide, as_values))
    except Exception as error:
        return error
    expected = decoded(wide)
    off, more = (float((logits - expected).norm() / expected.norm()) for logits in (found, rounded))
    return None if off < NEAR and more < 0.5 else f"logits are {off:.3g} and {more:.3g} off"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", few(matrix.FAMILIES, "qwen3-moe"))
@pytest.mark.parametrize(("method", "scheme"), matrix.SPELLINGS)
def test_transformers_computes_with_what_is_stored_or_the_checker_says_that_it_does_not(root, family, method, scheme):
    if BEFORE_5_23 and (method, scheme) == ("compressed-tensors", "mxfp8"):
        pytest.skip("transformers 5.17 computes with it in BF16 alone")
    directory = matrix.make(root, family, method, scheme)
    need_loader(directory)
    problem = problem_of_transformers(directory)
    assert ("transformers" in refusing(directory)) == (problem is not None), problem


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", few(matrix.CHANGES, *list(matrix.CHANGES)[::3]))
def test_of_directories_that_others_might_write_transformers_takes_those_that_the_checker_does(root, name):
    if BEFORE_5_23 and name == "scales of no dimension":
        pytest.skip("transformers 5.17 takes them")
    directory = matrix.make_changed(root, name)
    need_loader(directory)
    problem = problem_of_transformers(directory)
    assert ("transformers" in refusing(directory)) == (problem is not None), problem
