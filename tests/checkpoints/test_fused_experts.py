"""Experts in one tensor: read as slices, stacked again, as transformers itself saves and loads them."""

from pathlib import Path

import pico
import pytest
import torch
from any_models import export
from conversions import run, tree
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.hf_directory.fused_experts import is_stack, sliced, stacked
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor, StoredTensors, read_header
from precisionctl.checkpoints.huggingface import HuggingFaceWriter
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch
from precisionctl.param import TensorSpec
from precisionctl.precision import PRESETS
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check


class Slices:
    """The slices of one file, as a Reader would give them."""

    def __init__(self, file: Path) -> None:
        self.found = sliced(read_header(file), file)
        self.specs = {name: stored.spec for name, stored in self.found.items()}
        self.chunks = StoredTensors({name: (file, stored) for name, stored in self.found.items()}).chunks


@pytest.fixture
def gpt_oss(tmp_path: Path) -> GptOssForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = GptOssForCausalLM(
        GptOssConfig(**sizes, vocab_size=64, num_key_value_heads=2, head_dim=8, num_local_experts=4)
    )
    model.save_pretrained(tmp_path / "source")
    return model


def test_each_expert_of_transformers_fused_tensors_is_one_tensor(gpt_oss: GptOssForCausalLM, tmp_path: Path) -> None:
    slices = Slices(tmp_path / "source" / "model.safetensors")
    expected = {}
    for name, values in gpt_oss.state_dict().items():
        fused = ".experts." in name
        expected |= {f"{name}[{e}]": values[e] for e in range(4)} if fused else {name: values}
    assert slices.specs.keys() == expected.keys()
    assert "model.layers.1.mlp.experts.gate_up_proj_bias[3]" in expected
    for name, values in expected.items():
        assert torch.equal(read_tensor(slices, name), values), name


def test_slices_are_written_as_the_tensors_that_transformers_loads(gpt_oss: GptOssForCausalLM, tmp_path: Path) -> None:
    slices = Slices(tmp_path / "source" / "model.safetensors")
    (tmp_path / "target").mkdir()
    companions = Companions({"config.json": (tmp_path / "source" / "config.json").read_bytes()})
    writer = HuggingFaceWriter(tmp_path / "target", slices.specs, companions, {}, max_shard_size=8000)
    writer.lay_out()
    for name in reversed(slices.specs):
        write_rows(writer, name, 0, read_tensor(slices, name).reshape(slices.specs[name].rows, -1))
    writer.finish(None)
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    for name, values in gpt_oss.state_dict().items():
        assert torch.equal(loaded[name], values), name
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mlp.experts.down_proj_scale_inv", (8,), True),  # a scale for each expert
        ("mlp.experts.down_proj_scale_inv", (), False),  # one for all
        ("mlp.experts.e_score_correction_bias", (8,), False),  # of the router
        ("mlp.experts.down_proj_bias", (8, 64), True),
        ("moe.gate_proj.weight", (8, 64, 64), True),  # Step 3.5
        ("moe.gate_proj.weight", (64, 64), False),  # one MLP
    ],
)
def test_a_tensor_is_a_stack_by_its_name_and_its_dimensions(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_stack(f"model.layers.0.{name}", TensorSpec(shape, DType.float32)) == expected


def test_a_header_that_claims_a_billion_experts_is_refused_at_once() -> None:
    billion = {"mlp.experts.gate_up_proj": StoredTensor(TensorSpec((10**9, 0), DType.float32), 0)}
    with pytest.raises(DamagedCheckpoint, match="experts"):
        sliced(billion, "here")


def test_a_stack_of_no_experts_is_refused() -> None:
    """It has no slices: it would vanish."""
    empty = {"mlp.experts.gate_up_proj": StoredTensor(TensorSpec((0, 64, 64), DType.float32), 0)}
    with pytest.raises(DamagedCheckpoint, match="no experts"):
        sliced(empty, "here")


def test_a_name_that_poses_as_a_slice_is_refused(tmp_path: Path) -> None:
    save_file({"mlp.experts.down_proj": torch.ones(2, 3), "mlp.experts.down_proj[0]": torch.ones(3)}, tmp_path / "x")
    assert len(load_file(tmp_path / "x")) == 2
    with pytest.raises(DamagedCheckpoint, match=r"named as a slice"):
        sliced(read_header(tmp_path / "x"), tmp_path)


@pytest.mark.parametrize("names", [("[0]", "[2]"), ("[1]",)])
def test_slices_that_are_not_all_there_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ShapeMismatch, match="do not make one tensor"):
        stacked({f"mlp.experts.down_proj{name}": TensorSpec((2, 3), DType.float32) for name in names})


def test_mistral_4_has_its_experts_in_one_tensor_but_for_engines_and_verify_says_who_loads_which(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "qk_nope_head_dim": 48}
    sizes |= {"qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32}
    pico.save(tmp_path / "hf", "mistral4", dtype=torch.bfloat16, **sizes)
    for target in ("vllm", "transformers"):
        export(tmp_path / "hf", tmp_path / target, "dynamic", target)
        assert not check(open_checkpoint(tmp_path / target), engine_named(target))
        assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / target)).equal
    run(tmp_path / "hf", tmp_path / "converted", "hf", "fp8", recipe=PRESETS["fp8-current"])  # for vLLM, if for none
    weights = (tree(tmp_path / name)["model.safetensors"] for name in ("converted", "vllm"))
    assert next(weights) == next(weights)
    experts = ("model.layers.2.mlp.experts.7.gate_proj.weight", "model.layers.2.mlp.experts.gate_up_proj")
    apart, whole = (load_file(tmp_path / target / "model.safetensors") for target in ("vllm", "transformers"))
    assert apart[experts[0]].dtype == torch.float8_e4m3fn and experts[1] not in apart
    assert whole[experts[1]].dtype == torch.bfloat16 and experts[0] not in whole
    found = check(open_checkpoint(tmp_path / "vllm"), engine_named("transformers"))
    assert "experts of a layer one by one" in {each.what for each in found}
