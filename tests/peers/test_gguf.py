"""GGUF files that llama.cpp's converter writes and llama.cpp quantizes: read under the names, in the shapes and with
the values that transformers saved, and codes as gguf-py decodes them."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import environments
import pico
import pytest
import torch
from gguf_files import AS_RELEASED, LLAMA3, OLMO3, as_read
from safetensors.torch import load_file

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.gguf.tensors import GgufPart
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.ggml_formats import FORMATS
from precisionctl.model.same_model import differences

SPARSE: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""Experts in all layers: the converter has no names for others."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3": {"rope_parameters": LLAMA3},
    "llama-tied": {},
    "llama-all-biases": {},
    "llama-head-dim": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2-moe": SPARSE,
    "qwen3": {},
    "qwen3-moe": SPARSE,
    "qwen3-next": SPARSE,
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "phi3": {},
    "phi3-long": {},
    "olmo2": {},
    "olmo3": OLMO3,
    "granite": {},
    "granite-moe": {},
    "smollm3": {},
    "gpt-oss": {},
    "deepseek-v2": {},
    "deepseek-v2-groups": {},
    "deepseek-v3": {"scoring_func": "sigmoid"},
    "glm4-moe": {},
    **AS_RELEASED,
    "hunyuan": {"max_position_embeddings": 1 << 15},  # with a base that is stretched
    "glm": {"rms_norm_eps": 1e-5, "max_position_embeddings": 64},  # which the converter writes of all
    "mistral4": {
        "rope_parameters": AS_RELEASED["mistral4"]["rope_parameters"]
        | {"llama_4_scaling_beta": 0.0}  # which it does not
    },
}
UNSAID = {
    "mistral": {"sliding_window"},
    "mixtral": {"sliding_window"},
    "gemma2": {"query_pre_attn_scalar"},
    "gemma3": {"query_pre_attn_scalar"},
    "gpt-oss": {"activation_clamp"},
    "deepseek-v3": {"rope_scaling"},
    **dict.fromkeys(("gpt-neox", "falcon", "falcon-40b"), {"activation"}),
    "internlm3": {"rope_scaling", "max_position_embeddings"},
    "gemma3n": {"per_layer_vocab_size"},
    "falcon-mamba": {"mamba.bcdt_l2_norm_epsilon"},
    "hunyuan": {"rotary_base"},  # in more digits than FP32 has
    "falcon-h1": {"embedding_multiplier", "logit_multiplier"}  # which are in the weights, as those of layers
    | {f"multipliers.{each}" for each in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "ssm", "mlp")},
}
"""What GGUF does not say of these, and a reference has to."""
CODES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_NL", "IQ4_XS")


def save(directory: Path, family: str, changes: dict[str, Any]) -> None:
    """A small model, beside a vocabulary, to whose size the converter cuts Gemma's."""
    pico.save(directory, family, dtype=torch.bfloat16, **changes)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    vocabulary = {"model": {"vocab": {f"t{token}": token for token in range(size)}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))


def llama_cpp(folder: Path, *cases: Any) -> None:
    python, sources = environments.llama_cpp()
    found = os.pathsep.join(map(str, (sources, sources / "gguf-py")))
    command = [python, Path(__file__).parent / "gguf_convert.py", folder, json.dumps(cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


FILES = {"f32.gguf": "ALL_F32", "bf16.gguf": "MOSTLY_BF16"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family, with what transformers saved in `hf`, and FILES."""
    folder = tmp_path_factory.mktemp("converted")
    for family, changes in FAMILIES.items():
        save(folder / family / "hf", family, changes)
    cases = [(f"{family}/hf", f"{family}/{file}", kind, {}) for family in FAMILIES for file, kind in FILES.items()]
    llama_cpp(folder, *cases)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_converter_writes_is_read_as_the_model_that_was_saved(converted: Path, family: str) -> None:
    folder = converted / family
    published = open_checkpoint(folder / "hf")
    hints = Hints(companions=read_companions(folder / "hf"), reference=folder / "hf")
    for file in FILES:
        alone, told = open_checkpoint(folder / file), open_checkpoint(folder / file, None, hints)
        assert told.model == published.model and told.specs.keys() == alone.specs.keys()
        # of products, values are FP32; of tokens without embeddings for each layer, a file has rows
        assert told.specs == alone.specs or family in ("falcon-h1", "gemma3n")
        made = replace(alone.model, architecture=published.model.architecture)
        assert differences(made, published.model).keys() == UNSAID.get(family, set())
        expected = as_read({name: read_tensor(published, name) for name in published.specs})
        assert told.specs.keys() == expected.keys()
        for name, values in expected.items():
            found = read_tensor(told, name)
            rounded = torch.allclose(found.float(), values.float(), rtol=0, atol=2**-24) and "norm" in name  # plus one
            products = family == "falcon-h1" and torch.allclose(found, values.to(found.dtype), rtol=2**-8, atol=0)
            assert rounded or products or torch.equal(found.bfloat16(), values), (file, name)


def test_what_llama_cpp_quantizes_decodes_to_what_gguf_py_makes_of_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    save(tmp_path / "llama", "llama-2", sizes)
    save(tmp_path / "mixtral", "mixtral", sizes)
    cases = [("llama", "llama.gguf", "ALL_F32", {f"{kind}.gguf": kind for kind in CODES})]
    cases += [("mixtral", "mixtral.gguf", "ALL_F32", {"MXFP4.gguf": "MXFP4_MOE"})]
    llama_cpp(tmp_path, *cases)
    seen = set()
    for kind in (*CODES, "MXFP4"):
        expected = load_file(tmp_path / f"{kind}.safetensors")
        tensors = read_head(tmp_path / f"{kind}.gguf").tensors
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            part = GgufPart(name, tensor)
            found = part.rows(0, part.shape[0])
            assert torch.equal(found.float().view(expected[name].shape), expected[name]), (kind, name)
            seen.add(tensor.format.name)
        model = open_checkpoint(tmp_path / f"{kind}.gguf").model
        assert model.num_layers == 2 and model.hidden_size == 256
    assert seen == {form.name for form in FORMATS.values()} - {"F16", "BF16", "NVFP4"}  # llama.cpp makes none of this
