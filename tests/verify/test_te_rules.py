"""`verify --target te`: what `load_te` refuses of a directory, or would compute as nobody meant, is found, and nothing
else."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scoring import TOKENS
from target_checks import check_directory
from te_exports import export, make_source

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.rules.rule import Finding
from precisionctl.errors import PrecisionctlError, UnknownArchitecture, UnknownFormat
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8State, Fp8States, RoleState
from precisionctl.planning.make_plan import make_plan
from precisionctl.te import load_te
from precisionctl.verify.te_rules import check_te

QKV = "decoder.layers.1.self_attention.linear_qkv"
DOWN = "model.layers.0.mlp.down_proj.weight"


def check(directory: Path) -> list[Finding]:
    reader = HuggingFaceReader(directory)
    return check_te(reader, lambda: make_plan(reader, "megatron"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("te")
    return export(make_source(root / "hf"), root / "out")


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", "gpt2", "gemma3"])
def test_what_is_exported_keeps_every_rule(tmp_path: Path, family: str) -> None:
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}
    made = export(make_source(tmp_path / "hf", family, **sizes), tmp_path / "out")
    assert check(made) == []


def with_states(change: Callable[[Fp8States], Fp8States]) -> Callable[[Path], object]:
    def changed(directory: Path) -> None:
        file = directory / sidecar.LIVE
        states = sidecar.read(file)
        file.unlink()
        sidecar.write(file, change(states))

    return changed


def of_qkv(change: Callable[[Fp8State], Fp8State], to: str = QKV) -> Callable[[Path], object]:
    return with_states(lambda states: replace(states, modules={**states.modules, to: change(states.modules[QKV])}))


def quantized(directory: Path) -> None:
    file = directory / "config.json"
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))


def doubled(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {DOWN: tensors[DOWN] * 2}, file, metadata={"format": "pt"})


def unrecorded(state: Fp8State) -> Fp8State:
    return Fp8State({**state.roles, "input": RoleState.fresh(4)})


def of_experts(state: Fp8State) -> Fp8State:
    parts = {
        role: (part.scale.expand(4).clone(), part.amax_history.expand(4, -1).clone())
        for role, part in state.roles.items()
    }
    return Fp8State({role: RoleState(*both) for role, both in parts.items()})


BROKEN: dict[str, tuple[Callable[[Path], object], str, str, bool]] = {
    "no state": (lambda path: (path / sidecar.LIVE).unlink(), "te_state.safetensors", "not there", True),
    "half a file": (lambda path: (path / sidecar.LIVE).write_bytes(b"{"), "te_state", "cannot be read", True),
    "of codes": (quantized, "config.json", "a quantization_config", True),
    "of another model": (of_qkv(lambda state: state, "decoder.layers.7.mlp.linear_fc1"), "layers.7", "no GEMM", True),
    "of experts": (of_qkv(of_experts), QKV, "not []", True),
    "never recorded": (of_qkv(unrecorded), QKV, "never recorded", False),
    "a weight that has grown": (doubled, DOWN, "values up to 2 times", False),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_each_finding_is_one_line_with_its_source_and_load_te_agrees(
    exported: Path, tmp_path: Path, case: tuple[Callable[[Path], object], str, str, bool]
) -> None:
    change, where, what, fatal = case
    directory = shutil.copytree(exported, tmp_path / "out")
    change(directory)
    (found,) = check(directory)
    assert where in found.where and what in found.what and found.rule.source
    assert found.rule.fatal == fatal
    if where == "config.json" or where == "layers.7":  # transformers' own refusal; state that is left aside
        return
    if fatal:
        with pytest.raises((PrecisionctlError, RuntimeError)):
            load_te(directory, backend="emulated")
    else:
        assert load_te(directory, backend="emulated")(TOKENS).logits.isfinite().all()


def test_weights_of_sizes_that_no_fp8_gemm_takes_are_named(tmp_path: Path) -> None:
    """Exports are refused; this one was made by other hands."""
    source = make_source(tmp_path / "hf", intermediate_size=88)
    shutil.copytree(source, tmp_path / "out")
    (tmp_path / "out" / sidecar.RELATIVE).rename(tmp_path / "out" / sidecar.LIVE)
    found = [each for each in check(tmp_path / "out") if each.rule.fatal]
    parts = ("gate_proj", "up_proj", "down_proj")
    assert {each.where for each in found} == {f"model.layers.{n}.mlp.{part}.weight" for n in (0, 1) for part in parts}
    with pytest.raises(PrecisionctlError, match="multiples of 16"):
        load_te(tmp_path / "out", backend="emulated")


def test_the_command_says_so_and_exits_by_it(exported: Path, tmp_path: Path) -> None:
    kept = CliRunner().invoke(main, ["verify", str(exported), "--target", "te"])
    assert kept.exit_code == 0 and "every rule is kept" in kept.output
    directory = shutil.copytree(exported, tmp_path / "out")
    (directory / sidecar.LIVE).unlink()
    broken = CliRunner().invoke(main, ["verify", str(directory), "--target", "te", "--json"])
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["findings"][0]["rule"]["fatal"]
    assert CliRunner().invoke(main, ["verify", str(exported), "--target", "te", "--tp", "2"]).exit_code == 2


def test_a_tensor_that_is_missing_is_a_finding_beside_others(exported: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(exported, tmp_path / "out")
    tensors = load_file(directory / "model.safetensors")
    del tensors[DOWN]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PrecisionctlError, match="missing"):
        load_te(directory, backend="emulated")
    for change, count in (None, 1), ((directory / sidecar.LIVE).unlink, 2):
        if change:
            change()
        result = CliRunner().invoke(main, ["verify", str(directory), "--target", "te", "--json"])
        first, *others = json.loads(result.stdout)["findings"]
        assert result.exit_code == 1 and DOWN in first["what"] and first["rule"]["fatal"]
        assert 1 + len(others) == count


def test_a_model_without_a_table_gets_no_verdict(exported: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(exported, tmp_path / "out")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "no_such_model"}))
    with pytest.raises(UnknownArchitecture, match="no_such_model"):
        check_directory(directory, "te")


def test_megatron_is_for_an_export_first(exported: Path, tmp_path: Path) -> None:
    execute(plan_command(Request(exported, tmp_path / "megatron", "megatron")))
    with pytest.raises(UnknownFormat, match="export-inference"):
        check_directory(tmp_path / "megatron", "te")
