"""Models in PyTorch's own checkpoints, under Hugging Face's names or torchtitan's, are read as the live ones are."""

import io
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import repository
import torch
import torch.distributed.checkpoint as dcp
from programs import run_program
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties
from trained_models import config_of, save, states, trained

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_model import _wrapper
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor, Index, read_index, write_index
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionctlError, UnknownFormat
from precisionctl.reports import inspect

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_is(tensors: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == model.keys()
    for name, tensor in model.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        *(
            ("llama-3", prefix)
            for prefix in ("", "model.", "model.module.", "_orig_mod.", "model._orig_mod.", "model.module._orig_mod.")
        ),
        *(("gpt2", prefix) for prefix in ("", "model.")),
    ],
)
def test_names_are_those_of_the_model_whatever_wraps_it(tmp_path: Path, prefix: str, family: str) -> None:
    model = pico.make(family)
    stored = model.state_dict()
    made = save(tmp_path / "dcp", {f"{prefix}{name}": tensor for name, tensor in stored.items()})
    conversions.run(made, tmp_path / "out", "hf", reference=config_of(model, tmp_path / "config"))
    pico.make(family).save_pretrained(tmp_path / "by-transformers")
    assert_is(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "by-transformers/model.safetensors")
    )


def test_words_of_wrappers_are_left_out_of_layers_too(tmp_path: Path) -> None:
    model, word = pico.make("llama-3"), "_checkpoint_wrapped_module._orig_mod."
    state = {re.sub(r"(layers\.\d\.)", rf"\1{word}", name): tensor for name, tensor in model.state_dict().items()}
    made = save(tmp_path / "dcp", {"model": state})
    conversions.run(made, tmp_path / "out", "hf", reference=config_of(model, tmp_path / "config"))
    assert_is(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_the_path_in_the_index_has_the_name_that_the_python_of_the_run_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Python 3.13 has its paths in a module of their own."""
    monkeypatch.setitem(sys.modules, module, pathlib)
    monkeypatch.setattr(type(tmp_path), "__module__", module)
    made = save(tmp_path / "dcp", pico.make("llama-3").state_dict())
    index = (made / ".metadata").read_bytes()
    assert module.encode() in index and b"PosixPath" in index
    assert read_index(made).tensors


@pytest.mark.parametrize("strides", [(), (None,), ((64, 1),)], ids=["before 2.15", "none", "as in 2.15"])
def test_the_index_may_have_strides_and_is_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: tuple[Any, ...]
) -> None:
    """From PyTorch 2.15 on what is pickled of a tensor's properties has strides behind it (TensorProperties in
    torch/distributed/checkpoint/metadata.py). Before, PyTorch takes five values and no more."""
    before = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*before(self)[:5], *strides))
    model = pico.make("llama-3")
    made = save(tmp_path / "dcp", {"model": model.state_dict()})
    monkeypatch.undo()
    conversions.run(made, tmp_path / "out", "hf", container="dcp", reference=config_of(model, tmp_path / "config"))
    properties: list[tuple[Any, ...]] = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda self, state: properties.append(state))
    FileSystemReader(tmp_path / "out").read_metadata()
    assert len(properties) == len(model.state_dict()) and {len(each) for each in properties} == {5}
    monkeypatch.undo()
    found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load({"model": found}, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert_is(found, model.state_dict())


def test_two_ranks_of_fsdp_with_their_optimizer(tmp_path: Path) -> None:
    run_program(repository.HELPERS / "dcp_ranks.py", tmp_path)
    reference = config_of(pico.make("llama-3", vocab_size=253), tmp_path / "config")
    in_hf = conversions.run(tmp_path / "dcp", tmp_path / "hf", "hf", reference=reference, verify=True)
    conversions.run(tmp_path / "dcp", tmp_path / "megatron", "megatron", reference=reference)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
    live = torch.load(tmp_path / "live.pt")
    assert_is(load_file(tmp_path / "hf" / "model.safetensors"), live)
    assert_is(conversions.tensors(tmp_path / "back"), live)
    assert any("The optimizer stays behind: 42 tensors" in note for note in in_hf.notes)


def test_experts_in_one_tensor_become_those_that_their_class_saves(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path / "by-transformers", "qwen3-moe")
    assert any(re.search(r"experts\.gate_up_proj$", name) for name in model.state_dict())
    made = save(tmp_path / "dcp", {"model": model.state_dict()})
    for to in ("hf", "megatron"):
        conversions.run(made, tmp_path / to, to, reference=tmp_path / "by-transformers")
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_is(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "by-transformers/model.safetensors")
    )
    conversions.run(tmp_path / "hf", tmp_path / "respelled", "megatron")
    conversions.assert_same_tensors(tmp_path / "megatron", tmp_path / "respelled")


def test_a_step_of_accelerates_fsdp_with_a_config_beside_it(tmp_path: Path) -> None:
    model = pico.make("llama-tied")
    save(tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0", {"model": model.state_dict()})
    moments = {f"optimizer.state.{name}.exp_avg": torch.ones(3) for name in model.state_dict()}
    save(tmp_path / "checkpoint-3" / "optimizer_0", moments)
    config_of(model, tmp_path / "checkpoint-3")
    conversions.run(tmp_path / "checkpoint-3", tmp_path / "out", "hf")
    live = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert_is(load_file(tmp_path / "out" / "model.safetensors"), live)
    with pytest.raises(UnknownFormat, match="without its model"):
        open_checkpoint(tmp_path / "checkpoint-3" / "optimizer_0")
    for path in (tmp_path / "checkpoint-3", tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0"):
        with pytest.raises(CheckpointError, match="no iterations to choose from"):
            open_checkpoint(path, 5)


def in_titan(name: str) -> str:
    """torchtitan's name."""
    name = (
        name.removeprefix("model.")
        .replace("embed_tokens", "tok_embeddings")
        .replace("self_attn.o_proj", "attention.wo")
    )
    name = re.sub(r"self_attn\.([qkv])_proj", r"attention.qkv_linear.w\1", name)
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"), ("mlp", "feed_forward")):
        name = name.replace(ours, theirs)
    return name.replace("post_attention_layernorm", "ffn_norm").replace("input_layernorm", "attention_norm")


@pytest.mark.parametrize(
    "rename", [in_titan, lambda name: in_titan(name).replace("qkv_linear.", "").replace("lm_head", "output")]
)
def test_torchtitans_llama_has_pairs_of_rotary_rows_side_by_side(tmp_path: Path, rename: Callable[[str], str]) -> None:
    """Scores of its queries and keys, turned as complex numbers, are those of Hugging Face's, turned by halves."""
    model = pico.make("llama-3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    made = save(tmp_path / "dcp", {rename(name): tensor for name, tensor in model.state_dict().items()})
    conversions.run(made, tmp_path / "out", "hf", reference=config_of(model, tmp_path / "config"))
    theirs, ours = model.state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    moved = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert moved == {name for name in ours if name.endswith(("q_proj.weight", "k_proj.weight"))}
    hidden, size = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), 16
    angles = torch.outer(torch.arange(5.0), 10000.0 ** -(torch.arange(0, size, 2) / size))

    def complex_turned(weight: Tensor) -> Tensor:
        heads = (hidden @ weight.t()).view(5, -1, size // 2, 2)
        turned = torch.view_as_complex(heads.contiguous()) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return torch.view_as_real(turned).flatten(2)

    def turned_by_halves(weight: Tensor) -> Tensor:
        first, second = (hidden @ weight.t()).view(5, -1, size).chunk(2, -1)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def scores(turned: Callable[[Tensor], Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        q, k = (turned(weights[f"model.layers.1.self_attn.{kind}_proj.weight"]) for kind in "qk")
        return torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1))

    expected = scores(complex_turned, theirs)
    assert torch.allclose(scores(turned_by_halves, ours), expected, atol=1e-5)
    assert not torch.allclose(scores(turned_by_halves, theirs), expected, atol=1e-2)


@pytest.mark.parametrize("fused", [True, False])
def test_torchtitans_moments_move_as_its_weights_do(tmp_path: Path, fused: bool) -> None:
    """Moments that are the weights end up as these do; fused, a group has its queries, a key, a value."""
    model = pico.make("llama-3", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    stored = {in_titan(name): tensor for name, tensor in model.state_dict().items()}
    values = dict(stored)
    for layer in range(2) if fused else ():
        of_linear = f"layers.{layer}.attention.qkv_linear"
        q, k, v = (values.pop(f"{of_linear}.w{kind}.weight").view(2, -1, 16, 64) for kind in "qkv")
        values[f"{of_linear}.wqkv.weight"] = torch.cat((q, k, v), 1).reshape(-1, 64)
    state = {
        f"optimizer.state.{name}.{kind}": tensor
        for name, tensor in values.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    state |= {f"optimizer.state.{name}.step": torch.tensor(4.0) for name in values}
    made = save(tmp_path / "step-4", stored | state | {"optimizer.param_groups.norm.weight.lr": 0.1})
    conversions.run(made, tmp_path / "out", "megatron", reference=config_of(model, tmp_path / "config"), verify=True)
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and reader.iteration == 4
    weights = conversions.tensors(tmp_path / "out")
    for name, weight in weights.items():
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            moment = read_tensor(WithOptimizer(reader), f"optimizer.state.{kind}.{name}")
            assert torch.equal(moment, weight), (kind, name)


@pytest.mark.parametrize(
    ("more", "config", "message"),
    [
        ("layers.0.attention.wq.weight", {}, r"are both `model\.layers\.0\.self_attn\.q_proj\.weight`"),
        ("model.norm.weight", {}, r"are both `model\.norm\.weight`"),
        (None, {"head_dim": 15}, "heads of 15 rows"),
    ],
)
def test_torchtitans_names_for_one_tensor_and_odd_heads_are_refused(
    tmp_path: Path, more: str | None, config: dict[str, int], message: str
) -> None:
    model = pico.make("llama-3")
    stored = {in_titan(name): tensor for name, tensor in model.state_dict().items()}
    made = save(tmp_path / "dcp", stored | ({more: torch.ones(64, 64)} if more else {}))
    written = json.loads((config_of(model, tmp_path / "config") / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(written | config))
    with pytest.raises(DamagedCheckpoint, match=message):
        open_checkpoint(made)


def test_a_name_of_many_wrappers_takes_no_longer_than_its_length() -> None:
    wrapped = "module." * 100_000
    start = time.perf_counter()
    assert _wrapper([f"{wrapped}a", f"{wrapped}b.c"]) == wrapped
    assert time.perf_counter() - start < 5


def test_an_empty_extra_state_of_transformer_engine_is_no_tensor_of_the_model(tmp_path: Path) -> None:
    """Its modules return an empty one outside of FP8, and else the pickle of their state as bytes."""
    model = pico.make("llama-3")
    config, stored = config_of(model, tmp_path / "config"), dict(model.state_dict())
    for projection in "qkv":
        stored[f"model.layers.0.self_attn.{projection}_proj._extra_state"] = torch.empty(0, dtype=torch.uint8)
    made = conversions.run(save(tmp_path / "dcp", {"model": stored}), tmp_path / "out", "hf", reference=config)
    assert not any("FP8" in note for note in made.notes)
    assert_is(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())
    stored["model.layers.0.self_attn.q_proj._extra_state"] = torch.ones(7, dtype=torch.uint8)
    made = conversions.run(save(tmp_path / "fp8", {"model": stored}), tmp_path / "again", "hf", reference=config)
    assert "FP8 state of Transformer Engine stays behind: 1 module." in made.notes


def test_extra_states_of_older_transformer_engines_are_objects(tmp_path: Path) -> None:
    """Of TE 0.12 to 1.13 a file in memory, which has None outside of FP8 (module/base.py, get_extra_state)."""

    def in_memory(state: object) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(state, file)
        return file

    model = pico.make("llama-3")
    stored: dict[str, Any] = dict(model.state_dict())
    for number, state in enumerate((None, in_memory(None), in_memory({"scale_fwd": torch.ones(3)}))):
        stored[f"model.layers.0.mlp.linear{number}._extra_state"] = state
    path = config_of(model, save(tmp_path / "dcp", {"model": stored}))
    made = conversions.run(path, tmp_path / "out", "hf")
    assert "FP8 state of Transformer Engine stays behind: 1 module." in made.notes


def test_an_embedding_of_megatrons_name_is_not_yet_megatrons_model(tmp_path: Path) -> None:
    """ChatGLM's classes have it."""
    stored = {
        "transformer.embedding.word_embeddings.weight": torch.ones(8, 4),
        "transformer.encoder.layers.0.self_attention.query_key_value.weight": torch.ones(4, 4),
    }
    reader = open_checkpoint(save(tmp_path / "dcp", {"model": stored}))
    assert reader.container == "dcp" and reader.specs.keys() == stored.keys()


def test_a_tensor_that_was_saved_transposed_is_named_with_what_to_do(tmp_path: Path) -> None:
    reader = open_checkpoint(save(tmp_path / "dcp", {"model": {"lm_head.weight": torch.ones(4, 6).t()}}))
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` \[6, 4\] is stored transposed.*with .contiguous\(\)"):
        read_tensor(reader, "lm_head.weight")


def test_pieces_that_are_cut_in_a_third_dimension_are_named_with_what_to_do(tmp_path: Path) -> None:
    made = save(tmp_path / "dcp", {"conv.weight": torch.ones(2, 3, 4)})
    span = read_index(made).tensors["conv.weight"].pieces[0].span
    halves = tuple(DcpPiece((0, 0, at), (2, 3, 2), span) for at in (0, 2))
    write_index(made, Index({"conv.weight": DcpTensor((2, 3, 4), DType.float32, halves)}, {}))
    with pytest.raises(CheckpointError, match=r"`conv.weight` \[2, 3, 4\] is cut in another .*cut by rows"):
        open_checkpoint(made)


def test_a_checkpoint_without_a_config_asks_for_one(tmp_path: Path) -> None:
    made = save(tmp_path / "dcp", pico.make("llama-3").state_dict())
    with pytest.raises(CheckpointError, match=r"does not say which model it is.*--reference"):
        conversions.run(made, tmp_path / "out", "hf")


def test_fp8_codes_without_scales_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    stored = pico.make("llama-3").state_dict()
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"`model.norm.weight` is float8_e4m3fn: FP8 codes"):
        open_checkpoint(save(tmp_path / "dcp", stored))


def test_what_the_model_has_no_place_for_and_what_is_missing_is_refused(tmp_path: Path) -> None:
    model = pico.make("llama-3")
    config, stored = config_of(model, tmp_path / "config"), model.state_dict()
    more = save(tmp_path / "more", stored | {"ema.weight": torch.ones(3)})
    less = save(tmp_path / "less", {name: one for name, one in stored.items() if "layers.1.mlp.up" not in name})
    other = save(tmp_path / "other", pico.make("llama-3", vocab_size=999).state_dict())
    for made, message in (
        (more, r"unexpected +ema\.weight"),
        (less, r"missing +\S*up_proj"),
        (other, r"is \[999, 64\]"),
    ):
        with pytest.raises(PrecisionctlError, match=message):
            conversions.run(made, tmp_path / "out", "hf", reference=config)


def test_pieces_that_overlap_are_refused(tmp_path: Path) -> None:
    made = save(tmp_path / "dcp", {"model.norm.weight": torch.ones(6, 4)})
    (made / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    index = read_index(made)
    span = index.tensors["model.norm.weight"].pieces[0].span
    halves = (DcpPiece((0, 0), (3, 4), span), DcpPiece((2, 0), (3, 4), span))
    write_index(made, Index({"model.norm.weight": DcpTensor((6, 4), DType.float32, halves)}, {}))
    with pytest.raises(DamagedCheckpoint, match="do not make one tensor"):
        open_checkpoint(made)


def test_tensors_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    made = save(tmp_path / "dcp", states(model, optimizer))
    config_of(model, made)
    index = read_index(made)
    first, other = (f"optimizer.state.model.layers.{layer}.self_attn.q_proj.weight.exp_avg" for layer in range(2))
    write_index(made, Index({**index.tensors, other: index.tensors[first]}, index.objects))
    with pytest.raises(DamagedCheckpoint, match=r"layers\.0\S+ and \S+layers\.1\S+ are on the same bytes"):
        open_checkpoint(made)


def test_a_name_that_poses_as_an_expert_of_a_stack_is_refused(tmp_path: Path) -> None:
    made = save(tmp_path / "dcp", {"model.layers.0.mlp.experts.down_proj[0]": torch.ones(3, 4)})
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="named as a slice"):
        open_checkpoint(made)


@pytest.mark.parametrize("config", [True, False])
def test_inspect_says_what_a_checkpoint_holds_with_a_config_or_without(tmp_path: Path, config: bool) -> None:
    model, optimizer = trained("llama-3", updates=3)
    made = save(tmp_path / "dcp", states(model, optimizer))
    if config:
        config_of(model, made)
    description = inspect.describe(open_checkpoint(made))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert (description["container"], description["iteration"], description["parameters"]) == ("dcp", 3, numbers)
    assert description["optimizer"] == {"tensors": 2 * len(model.state_dict()), "bytes": 8 * numbers}
    assert description["architecture"] == ("llama" if config else None) and description["stored_names"] is None
    shown = {row[0]: row[1] for row in inspect.summary(description).rows}
    assert ("--reference" in shown["architecture"]) != config and ("layers" in shown) == config


def test_a_torchtitan_checkpoint_without_a_config_is_shown_under_its_own_names(tmp_path: Path) -> None:
    stored = {in_titan(name): tensor for name, tensor in pico.make("llama-3").state_dict().items()}
    reader = open_checkpoint(save(tmp_path / "dcp", stored))
    assert reader.specs.keys() == stored.keys()
    description = inspect.describe(reader)
    assert (description["architecture"], description["stored_names"]) == (None, "torchtitan")
    assert ("layout", "hf, stored under torchtitan's names") in inspect.summary(description).rows
