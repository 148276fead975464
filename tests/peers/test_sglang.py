"""What SGLang computes as one, read in its wheel: its modules ask for CUDA, and are not run."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from precisionctl.engines.serving import FUSED, LATENT

WHEEL = "sglang==0.5.23"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "gpt2", "gpt_j")
MODELS = (*FAMILIES, "gemma2", "gemma3_causal")
KNOWN = {*FUSED, LATENT}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ast.Module]:
    folder = tmp_path_factory.mktemp("sglang")
    wanted = ["--no-deps", "--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", "-q", *wanted, "--dest", folder, WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: ast.parse(archive.read(f"sglang/srt/models/{name}.py")) for name in MODELS}


def groups(module: ast.Module) -> set[tuple[str, ...]]:
    """The lists of names that are values of `packed_modules_mapping`, or put into one."""
    found = set()
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any("packed_modules_mapping" in ast.unparse(target) for target in targets):
            lists = [each for each in ast.walk(node) if isinstance(each, ast.List)]
            found |= {tuple(ast.literal_eval(each)) for each in lists}
    return {group for group in found if len(group) > 1}


def loaded_together(module: ast.Module) -> set[tuple[str, ...]]:
    """What `load_weights` puts into one parameter: `(parameter, part, number)`, one after the other."""
    found: dict[tuple[int, str], list[str]] = {}
    for node in ast.walk(module):
        names = {ast.unparse(target) for target in node.targets} if isinstance(node, ast.Assign) else set()
        if names == {"stacked_params_mapping"} and isinstance(node.value, ast.List):
            for entry in node.value.elts:
                parameter, part, _ = ast.literal_eval(entry)
                found.setdefault((node.lineno, parameter.strip(".")), []).append(part.strip("."))
    return {tuple(parts) for parts in found.values()}


def test_every_group_is_known(sources: dict[str, ast.Module]) -> None:
    assert LATENT in groups(sources["deepseek_v2"])
    for name, module in sources.items():
        assert groups(module) | loaded_together(module) <= KNOWN, name
    assert ("q_proj", "k_proj", "v_proj") in loaded_together(sources["mixtral"])
