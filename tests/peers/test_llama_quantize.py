"""Files of K-quants that are written here, judged by llama.cpp: what llama-quantize makes of our files of values."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import environments
import gguf_files
import pico
import pytest
import torch
from gguf_files import export, source
from gguf_tokenizers import SIZE, byte_level

from precisionctl.checkpoints.gguf.file_types import MIXTURES
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2

WIDE = {"hidden_size": 256, "intermediate_size": 256}
"""Rows that are whole blocks; those of the models of `pico` have fewer values."""
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{family: (family, {}, ("q4_k_m",)) for family in gguf_files.WRITTEN},
    "wide": ("llama-3", {**WIDE, "num_hidden_layers": 17}, MIXTURES),
    "70B": ("llama-3", {**WIDE, "num_hidden_layers": 80}, ("q4_k_m", "q4_k_s")),
    "65B": ("llama-3", {**WIDE, "num_hidden_layers": 80, "num_key_value_heads": 4}, ("q4_k_m",)),
    "Qwen2 72B": ("qwen2", {**WIDE, "num_hidden_layers": 80}, ("q4_k_m",)),
    "eight experts": ("mixtral", {**WIDE, "num_hidden_layers": 9, "num_local_experts": 8}, MIXTURES),
    "Falcon": ("falcon", {"hidden_size": 256, "num_hidden_layers": 17}, MIXTURES),
    **{
        f"wide {family}": (family, {**WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 9}, ("q5_k_m", "q4_k_m"))
        for family in ("qwen3-moe", "deepseek-v3", "gpt-oss")
    },
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("judged")
    cases = []
    for case, (family, changes, mixtures) in CASES.items():
        published = source(folder / case / "hf", family, **gguf_files.WRITTEN.get(family, {}) | changes)
        values = export(published, folder / case / "bf16" / "Model")
        for mixture in mixtures:
            codes = export(published, folder / case / mixture / "Model", mixture)
            cases.append((str(values.relative_to(folder)), str(codes.relative_to(folder)), mixture.upper()))
    return judge(folder, cases)


def judge(folder: Path, cases: list[tuple[str, str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """What llama.cpp says of each case and mixture."""
    python, sources = environments.llama_cpp()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(sources / "gguf-py")}
    command = [python, Path(__file__).parent / "llama_quantize.py", folder, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {(file.split("/")[0], file.split("/")[1]): answer for file, answer in found.items()}


def test_files_are_byte_for_byte_what_llama_quantize_makes_but_for_what_is_stated(judged: Any) -> None:
    for (case, mixture), found in judged.items():
        if case == "falcon-h1":  # whose products it finds rounded to BF16
            assert all("F32" not in found["types"][name] for name in found["tensors"])
            continue
        assert found["same"], (case, mixture, found["tensors"])


def test_the_cases_have_every_type_that_a_mixture_may_give(judged: Any) -> None:
    types = {type_ for found in judged.values() for type_ in found["types"].values()}
    assert types >= {"F32", "F16", "BF16", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
    of_values = [judged[case, "q4_k_m"]["types"]["blk.40.attn_v.weight"] for case in ("65B", "70B")]
    assert of_values == ["Q4_K", "Q5_K"]


def test_of_a_model_in_fp16_they_are_what_is_made_of_the_file_in_fp16(tmp_path: Path) -> None:
    published = tmp_path / "case" / "hf"
    pico.save(published, "gemma4-small", vocab_size=SIZE, dtype=torch.float16, **gguf_files.WRITTEN["gemma4-small"])
    byte_level(QWEN2).save_pretrained(published)
    values, codes = (export(published, tmp_path / "case" / kind / "Model", kind) for kind in ("f16", "q4_k_m"))
    case = (str(values.relative_to(tmp_path)), str(codes.relative_to(tmp_path)), "Q4_K_M")
    assert judge(tmp_path, [case])["case", "q4_k_m"]["same"]
