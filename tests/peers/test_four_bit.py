"""Whole models that llm-compressor and ModelOpt quantize to four bits: every weight decodes to what the tool says of
it, and comes back from BF16; the golden files are still what the tools write; and the tools read ours."""

import shutil
import subprocess
import sys
from pathlib import Path

import conversions
import environments
import four_bit_models
import in_memory
import pytest
import torch
from four_bit_weights import FourBitWeight
from safetensors.torch import load_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.request import Request
from precisionctl.fp8 import sidecar

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
SCHEMES = [
    *("ct-NVFP4", "ct-NVFP4A16", "ct-MXFP4", "modelopt-nvfp4", "modelopt-mxfp4"),
    *("ct-W4A16", "ct-W4A16_ASYM", "ct-W4A16_G32", "ct-W4A16_G32_ASYM"),
]
OURS = ("nvfp4", "nvfp4a16", "mxfp4", "w4a16")
WITH_EXPERTS = [("qwen3_moe", scheme) for scheme in ("ct-NVFP4", "ct-W4A16_G32", "modelopt-nvfp4")]


def quantize(folder: Path, scheme: str) -> None:
    """Make `scheme` and `scheme-expected.safetensors` of `source`."""
    tool, _, its = scheme.partition("-")
    if tool == "ct":
        programs = [(environments.llm_compressor(), "llmcompressor_export.py", "source", scheme, its)]
    else:
        python, expected = environments.modelopt(), f"{scheme}-expected.safetensors"
        programs = [
            (python, "modelopt_export.py", "source", scheme, its),
            (python, "modelopt_decode.py", scheme, expected),
        ]
    for python, script, *arguments in programs:
        subprocess.run([python, HERE / script, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    four_bit_models.save(folder / "source", "llama")
    return folder


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-moe")
    four_bit_models.save(folder / "source", "qwen3-moe")
    return folder


@pytest.mark.parametrize(("family", "scheme"), [*(("llama", scheme) for scheme in SCHEMES), *WITH_EXPERTS])
def test_every_weight_decodes_to_what_the_tool_says_and_comes_back(request, family, scheme):
    """ModelOpt's NVFP4 reads code 8 as +0, which is told apart from -0 by its bits alone."""
    folder = request.getfixturevalue(family)
    quantize(folder, scheme)
    stored, expected = (load_file(folder / f"{scheme}{end}.safetensors") for end in ("/model", "-expected"))
    assert len(expected) == (14 if family == "llama" else 2 * 4 + 3 + 4 * 3)
    for name, values in expected.items():
        module = name.removesuffix("weight")
        weight = FourBitWeight({key.removeprefix(module): t for key, t in stored.items() if key.startswith(module)})
        found = weight.decoded()
        assert torch.equal(found, values) and torch.equal(weight.encoded(found), weight.codes), name
        if scheme != "modelopt-nvfp4":
            assert torch.equal(found.view(torch.int16), values.view(torch.int16)), name


def test_the_golden_files_are_what_the_tools_write(llama, tmp_path):
    """The script beside them, on what the tests above have made."""
    script = tmp_path / "four_bit.py"
    script.write_text((GOLDEN / script.name).read_text())
    subprocess.run([sys.executable, script, llama], check=True)
    made, golden = (sorted((folder / "four_bit").iterdir()) for folder in (tmp_path, GOLDEN))
    assert [file.name for file in made] == [file.name for file in golden] and len(made) == 1 + len(SCHEMES)
    for file, expected in zip(made, golden, strict=True):
        assert file.read_bytes() == expected.read_bytes(), file.name


@pytest.mark.parametrize(("scheme", "family"), [(each, "llama") for each in OURS] + [("nvfp4", "qwen3_moe")])
def test_compressed_tensors_decompresses_ours_to_what_we_decode(request, tmp_path, scheme, family):
    """Every weight of an export for vLLM, bit for bit."""
    source = tmp_path / "source"
    shutil.copytree(request.getfixturevalue(family) / "source", source)
    sidecar.write(source / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(source)))
    conversions.carry_out(Request.export(source, tmp_path / "ours", "vllm", scheme))
    conversions.run(tmp_path / "ours", tmp_path / "bf16", "hf")
    script, python = HERE / "compressed_tensors_decode.py", environments.llm_compressor()
    subprocess.run([python, script, tmp_path / "ours", tmp_path / "theirs"], check=True)
    theirs, ours = load_file(tmp_path / "theirs"), load_file(tmp_path / "bf16" / "model.safetensors")
    assert len(theirs) == (14 if family == "llama" else 2 * 4 + 3 + 4 * 3)
    for name, values in theirs.items():
        assert torch.equal(ours[name].view(torch.int16), values.view(torch.int16)), name
