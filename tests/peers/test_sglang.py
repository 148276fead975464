"""What SGLang computes as one, read in its wheel: its modules ask for CUDA, and are not run. And which config group it
takes, by the functions of its wheel that need nothing."""

import ast
import random
import re
import subprocess
import sys
import typing
import zipfile
from pathlib import Path
from typing import Any

import pytest

from precisionctl.engines.rules.config_groups import Targets
from precisionctl.engines.rules.ignore_lists import BY_END_OR_REGEX
from precisionctl.engines.rules.required_keys import IN_SGLANG
from precisionctl.engines.serving import FUSED, LATENT

WHEEL = "sglang==0.5.23"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "gpt2", "gpt_j")
NEWER = (
    *("afmoe", "exaone4", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hunyuan_v3", "hunyuan_v4", "laguna", "lfm2"),
    *("lfm2_moe", "mimo_v2", "minimax_m2", "muse_glimmer", "muse_spark", "nemotron_h"),
)
MODELS = (*FAMILIES, *NEWER, "gemma2", "gemma3_causal")
FILES = {"hy_v3": "hunyuan_v3", "mimo_v2_flash": "mimo_v2", "muse_spark_text": "muse_spark"}
FILES |= dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), "deepseek_v2")
"""Of models whose file has another name."""
TARGETS = "sglang/srt/layers/quantization/compressed_tensors/utils.py"
KNOWN = {*FUSED, LATENT}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    wanted = ["--no-deps", "--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", "-q", *wanted, "--dest", folder, WHEEL]
    subprocess.run(command, check=True)
    (found,) = Path(folder).glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sources(wheel: Path) -> dict[str, ast.Module]:
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


def test_the_published_words_that_config_json_must_have_are_asked_for(sources: dict[str, ast.Module]) -> None:
    for model_type, keys in IN_SGLANG.items():
        module = sources[FILES.get(str(model_type), str(model_type))]
        asked = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
        asked |= {str(node.value) for node in ast.walk(module) if isinstance(node, ast.Constant)}
        assert asked >= {*keys}, model_type


def test_no_codes_of_muse_spark_are_loaded_but_modelopts(sources: dict[str, ast.Module]) -> None:
    assert "Only BF16, serialized ModelOpt NVFP4 and AutoGPTQ int4 are supported" in ast.unparse(sources["muse_spark"])


class QKVParallelLinear:
    """As SGLang calls the class of a linear."""


def test_a_target_is_chosen_as_sglang_chooses_it(wheel: Path) -> None:
    """Its functions need nothing but the standard library: they are taken out of the file, and run."""
    with zipfile.ZipFile(wheel) as archive:
        functions = [each for each in ast.parse(archive.read(TARGETS)).body if isinstance(each, ast.FunctionDef)]
    theirs: dict[str, Any] = {**vars(typing), "re": re, "MappingProxyType": dict, "Module": object}
    wanted = [each for each in functions if each.name != "is_activation_quantization_format"]
    exec(compile(ast.Module(wanted, []), TARGETS, "exec"), theirs)
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    fused = {f"{path}.{part}": f"{path}.{into}" for path, into in PATHS.items() for part in parts[into]}
    modules = [*fused, "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
    patterns = [
        "re:.*self_attn.*",
        r"re:.*\.(q|k)_proj$",
        r"re:.*\.q_proj",
        "re:.*_proj",
        "re:.*qkv.*",
        "re:.*gate_up.*",
    ]
    draw, without = random.Random(0), 0
    for _ in range(500):
        targets = draw.sample(["Linear", *modules, *fused.values(), *patterns], draw.randint(1, 5))
        ours = Targets(targets, set(modules), fuses=True, class_first=True)
        ends = [target[draw.choice([0, len("model."), len("model.layers.0.")]) :] for target in targets]
        ignored = BY_END_OR_REGEX.of(ends)
        for module in modules:
            assert ignored(module) == theirs["check_equal_or_regex_match"](module, ends)
            try:
                chosen = theirs["find_matched_target"](fused.get(module, module), QKVParallelLinear(), targets, parts)
            except ValueError:
                chosen = None
            assert ours.of(module) == chosen, (targets, module)
            without += chosen is None
    assert 0.1 < without / (500 * len(modules)) < 0.9


PATHS = {"model.layers.0.self_attn": "qkv_proj", "model.layers.0.mlp": "gate_up_proj"}
