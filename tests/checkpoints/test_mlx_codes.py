"""MLX: what mlx-lm quantized and saved, decoded to BF16 by every command."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import mlx_directories
import pico
import pytest
import repository
import soaking
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded import mlx_codes
from precisionctl.checkpoints.decoded.mlx_parts import weights_in_parts
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.mlx import mlx_names
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, MappingError, PrecisionctlError, PrecisionError
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe
from precisionctl.untrusted.safe_files import LENGTHS
from precisionctl.verify.compare import compare

UP = "model.layers.0.mlp.up_proj"
GOLDEN = repository.GOLDEN / "mlx_codes.safetensors"
MOE = {"family": "qwen3-moe", "num_hidden_layers": 2, "moe_intermediate_size": 64}
MIXED = ("5-bit integers and MXFP4 codes", {"model.layers.0.self_attn.v_proj.weight"})


def change(directory: Path, changed: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change the tensors and config.json."""
    file, path = directory / "model.safetensors", directory / "config.json"
    tensors, config = load_file(file), json.loads(path.read_text())
    changed(tensors, config)
    save_file(tensors, file, {"format": "mlx"})
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("spelling", mlx_directories.SPELLINGS)
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, spelling: str) -> None:
    more = MOE if spelling == "nvfp4-of-experts" else {}
    values = mlx_directories.make(tmp_path / "source", spelling, **more)
    assert len(values) == (2 + 2 * 4 + 3 + 24 + 1 if more else 8 if spelling == "mixed" else 9)
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", verify=True).notes
    assert any(
        note.startswith(f"{len(values)} weights were ") and "makes new codes of these values, perhaps others" in note
        for note in notes
    )
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {name.rpartition(".")[2] for name in found} == {"weight"}
    for name, expected in values.items():
        assert torch.equal(found[name], expected), name
    assert (
        not {"quantization", "quantization_config"} & json.loads((tmp_path / "bf16" / "config.json").read_text()).keys()
    )
    source = open_checkpoint(tmp_path / "source")
    assert compare(source, open_checkpoint(tmp_path / "bf16")).equal
    change(tmp_path / "bf16", lambda tensors, config: tensors.update({each: 3 * tensors[each] for each in values}))
    differing = compare(source, open_checkpoint(tmp_path / "bf16"))
    assert {each.name for each in differing.tensors if not each.equal} == {*values}
    if spelling in ("affine-3", "nvfp4-of-experts"):
        conversions.run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
        assert compare(source, open_checkpoint(tmp_path / "megatron")).equal


def test_modules_have_settings_of_their_own_or_are_no_codes(tmp_path: Path) -> None:
    values = mlx_directories.make(tmp_path, "mixed")
    assert describe(open_checkpoint(tmp_path))["precision"] == f"{MIXED[0]} of mlx, read as bfloat16"
    assert {
        name for name in load_file(tmp_path / "model.safetensors") if name.endswith("proj.weight")
    } - values.keys() == (MIXED[1])


CASES = sorted(name.removesuffix(".decoded") for name in load_file(GOLDEN) if name.endswith(".decoded"))


def golden(case: str, *beside: str) -> mlx_codes.MlxCodes:
    """The golden codes of a case, and tensors of others beside them."""
    mode, *sizes = case.split("-")
    said = {"mode": mode if mode in mlx_codes.MODES else "nvfp4", "bits": 8 if mode == "mxfp8" else 4}
    said |= {"group_size": 16 if said["mode"] == "nvfp4" else 32}
    said |= {"bits": int(sizes[0]), "group_size": int(sizes[1])} if sizes else {}
    names = [name for name in read_header(GOLDEN) if name.startswith(f"{case}.")]
    stored = {name: (GOLDEN, read_header(GOLDEN)[name]) for name in (*names, *beside)}
    config = {"model_type": "llama", "quantization": said}
    places, published = mlx_names.in_published_names(stored, config, GOLDEN)
    return mlx_codes.MlxCodes(StoredTensors(places), published, GOLDEN)


@pytest.mark.parametrize("case", CASES)
def test_what_mlx_has_coded_is_what_it_makes_of_it(case: str) -> None:
    codes = golden(case)
    found = torch.stack([read_tensor(codes, name) for name in codes.specs])
    expected = load_file(GOLDEN)[f"{case}.decoded"].bfloat16()
    assert torch.equal(found, expected if expected.dim() == 3 else expected[None])


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("affine-4", "affine-8", "mxfp", "nvfp4"))])
def test_values_are_coded_anew_in_the_dtype_of_their_own_scales_whatever_is_beside_them(case: str) -> None:
    beside = "affine-4-64-float16.decoded" if case.startswith("affine") else f"{case}.decoded"
    cast = golden(case, beside).cast(f"{case}.weight")
    stored = load_file(GOLDEN)
    assert cast
    assert torch.equal(cast.rounded(stored["values"]), stored[f"{case}.decoded"].bfloat16().float())


def test_there_is_a_golden_weight_of_each_mode_number_of_bits_group_and_dtype() -> None:
    of_mode, of_bits, of_group, of_dtype = (
        set(each) for each in zip(*(case.split("-") for case in CASES if case.startswith("affine")), strict=True)
    )
    assert (of_mode, of_bits, of_group) == ({"affine"}, set("1234568"), {"32", "64", "128"})
    assert of_dtype == {"bfloat16", "float16", "float32"}
    assert {case for case in CASES if "-" not in case} == {
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "model.layers.0.mlp.switch_mlp.up_proj",
    }


@pytest.mark.parametrize("spelling", ["affine-3", "affine-4", "mxfp8", "nvfp4-of-experts"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mlx_directories.make(tmp_path, spelling, **MOE)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    name = next(name for name in values if ".experts.1.down_proj" in name)
    assert torch.equal(read_tensor(reader, name), values[name])
    for row, rows in ((0, 1), (31, 2), (33, 64), (127, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), values[name][row : row + rows])


def test_headers_alone_say_what_the_whole_says(tmp_path: Path) -> None:
    mlx_directories.make(tmp_path, "affine-4", **MOE)
    whole = describe(open_checkpoint(tmp_path))
    file = tmp_path / "model.safetensors"
    assert sum(whole["bytes_by_dtype"].values()) == sum(tensor.nbytes for tensor in load_file(file).values())
    (tmp_path / LENGTHS).write_text(json.dumps({file.name: file.stat().st_size}))
    os.truncate(file, min(tensor.offset for tensor in read_header(file).values()))
    assert describe(open_checkpoint(tmp_path)) == whole


FAMILIES = ("llama-tied", "qwen3-moe", "mamba2", "nemotron-h", "deepseek-v3", "gpt-oss", "granite-moe", "qwen3-next")
RENAMED = ("granite-hybrid-dense", "exaone-moe", "laguna", "lfm2-moe", "mixtral", *soaking.in_soak("step3p5"))


@pytest.mark.parametrize("family", [*FAMILIES, *RENAMED])
def test_values_that_mlx_saved_are_those_of_the_model_under_its_published_names(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "mlx", family, dtype=torch.bfloat16)
    file = tmp_path / "mlx" / "model.safetensors"
    before = load_file(file)
    if family in ("qwen3-next", "step3p5"):  # numbers that have one added to them without rounding
        before |= {name: (each * 8).round() / 64 for name, each in before.items() if name.endswith("norm.weight")}
        save_file(before, file)
    change(tmp_path / "mlx", mlx_directories.rename)
    assert family == "llama-tied" or before.keys() != load_file(file).keys() or family == "mamba2"
    conversions.run(tmp_path / "mlx", tmp_path / "hf", "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor), name


def test_values_that_mlx_saved_of_another_family_are_not_read(tmp_path: Path) -> None:
    """It adds one to norms of Qwen3.5, and moves channels of its convolutions."""
    pico.save(tmp_path / "mlx", "falcon-h1", dtype=torch.bfloat16)
    change(tmp_path / "mlx", lambda tensors, config: None)  # but for `format: mlx`
    with pytest.raises(PrecisionError, match="values of MLX of a 'falcon_h1'"):
        open_checkpoint(tmp_path / "mlx")


@pytest.mark.parametrize(("family", "spelling"), [("deepseek-v3", "nvfp4"), ("gpt-oss", "mxfp4")])
def test_codes_of_parts_are_put_together(
    tmp_path: Path, family: str, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"head_dim": 8} if family == "deepseek-v3" else {}  # that of its positions
    values = mlx_directories.make(tmp_path, spelling, family, num_hidden_layers=2, **sizes)
    part = "self_attn.kv_b_proj.weight" if family == "deepseek-v3" else "experts.gate_up_proj_blocks[1]"
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    for name, expected in values.items():
        assert torch.equal(read_tensor(reader, name), expected), name
    name = f"model.layers.1.{'' if family == 'deepseek-v3' else 'mlp.'}{part}"
    for row, rows in ((0, 1), (15, 2), (17, 50), (len(values[name]) - 1, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), values[name][row : row + rows])


def test_norms_beside_convolutions_as_published_are_as_published_too(tmp_path: Path) -> None:
    pico.save(tmp_path / "bf16", "qwen3-next", dtype=torch.bfloat16)
    pico.save(tmp_path / "mlx", "qwen3-next", dtype=torch.bfloat16)
    change(tmp_path / "mlx", lambda tensors, config: None)  # but for `format: mlx`
    assert compare(open_checkpoint(tmp_path / "bf16"), open_checkpoint(tmp_path / "mlx")).equal


def test_the_page_names_the_families_that_are_read() -> None:
    page = (repository.DOCS / "mlx.md").read_text()
    said = page.partition("This is known of these `model_type`s:")[2].partition("\n\n")[0]
    assert re.findall(r"`([\w-]+)`", said) == sorted(mlx_names.RENAMED)


def test_a_null_for_the_metadata_is_read_as_mlx_writes_it_where_it_is_given_none(tmp_path: Path) -> None:
    header = b'{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\7")
    assert [*read_header(tmp_path / "a.safetensors")] == ["a"]


Changed = Callable[[dict[str, Tensor], dict[str, Any]], object]


def put(name: str, tensor: Tensor | None) -> Changed:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return changed


def say(**keys: object) -> Changed:
    """Other settings of all modules."""
    return lambda tensors, config: config["quantization"].update(keys)


def own(said: object) -> Changed:
    """Settings of the module's own."""
    return lambda tensors, config: config["quantization"].update({UP: said})


def quantization(said: object) -> Changed:
    return lambda tensors, config: config.update(quantization=said)


WORDS, SCALES, BYTES = torch.ones(128, 16, dtype=torch.uint32), torch.ones(128, 2).bfloat16(), torch.uint8
NOTHING, EMPTY = torch.ones(128, 0, dtype=torch.uint32), torch.ones(128, 0).bfloat16()
HOSTILE: dict[str, tuple[str, Changed, type[PrecisionctlError], str]] = {
    "no settings": ("affine-4", quantization(None), DamagedCheckpoint, "`quantization` does not say which: None"),
    "settings in words": ("affine-4", quantization("4bit"), DamagedCheckpoint, "does not say which: '4bit'"),
    "settings in a list": ("affine-4", quantization([4, 64]), DamagedCheckpoint, "does not say which"),
    "empty settings": ("affine-4", quantization({}), DamagedCheckpoint, "not an object with `group_size`"),
    "another method": ("affine-4", say(quant_method="gptq", bits=5), DamagedCheckpoint, "no 5-bit integers"),
    "no bits": ("affine-4", quantization({"group_size": 64}), DamagedCheckpoint, "not an object with `group_size`"),
    "bits in words": ("affine-4", say(bits="4"), PrecisionError, "`bits` '4'"),
    "bits that are true": ("affine-4", say(bits=True), PrecisionError, "`bits` True"),
    "seven bits": ("affine-4", say(bits=7), PrecisionError, "`bits` 7"),
    "other bits": ("affine-4", say(bits=8), DamagedCheckpoint, "which are no 8-bit integers in groups of 64"),
    "other groups": ("affine-4", say(group_size=32), DamagedCheckpoint, "no 4-bit integers in groups of 32"),
    "huge groups": ("affine-4", say(group_size=1 << 62), PrecisionError, "`group_size` 4611686018427387904"),
    "groups below zero": ("affine-4", say(group_size=-64), PrecisionError, "`group_size` -64"),
    "another mode": ("affine-4", say(mode="mxfp4"), PrecisionError, "which the mode mxfp4 does not have"),
    "a mode that is none": ("affine-4", say(mode="gguf"), PrecisionError, "in the mode 'gguf'"),
    "a mode that is a list": ("affine-4", say(mode=["affine"]), PrecisionError, "in the mode"),
    "codes of no codes": ("affine-4", own(False), DamagedCheckpoint, "is not quantized"),
    "a number for a module": ("affine-4", own(7), DamagedCheckpoint, "up_proj is 7, not an object"),
    "a module of another mode": ("affine-4", own({"mode": "mxfp8"}), DamagedCheckpoint, "which are no MXFP8 codes"),
    "a key that is not known": ("affine-4", own({"rotated": True}), PrecisionError, "with `rotated` True"),
    "no scales": ("affine-4", put(f"{UP}.scales", None), DamagedCheckpoint, "no .*up_proj.scales for its codes"),
    "no biases": ("affine-4", put(f"{UP}.biases", None), DamagedCheckpoint, "no .*up_proj.biases for its codes"),
    "no codes": ("affine-4", put(f"{UP}.weight", None), DamagedCheckpoint, "no .*up_proj.weight for its codes"),
    "codes of bytes": ("affine-4", put(f"{UP}.weight", WORDS.view(BYTES)), DamagedCheckpoint, "no 4-bit integers"),
    "codes in a row": ("affine-4", put(f"{UP}.weight", WORDS.view(-1)), DamagedCheckpoint, "no 4-bit integers"),
    "codes in three dimensions": ("affine-4", put(f"{UP}.weight", WORDS[None]), DamagedCheckpoint, "no 4-bit integers"),
    "a word less": ("affine-4", put(f"{UP}.weight", WORDS[:, 1:].clone()), DamagedCheckpoint, "no 4-bit integers"),
    "a row less": ("affine-4", put(f"{UP}.scales", SCALES[1:].clone()), DamagedCheckpoint, "no 4-bit integers"),
    "biases of FP32": ("affine-4", put(f"{UP}.biases", SCALES.float()), DamagedCheckpoint, "no 4-bit integers"),
    "scales of bytes": ("affine-4", put(f"{UP}.scales", SCALES.to(BYTES)), DamagedCheckpoint, "no 4-bit integers"),
    "scales of NaN": ("affine-4", put(f"{UP}.scales", SCALES * torch.nan), DamagedCheckpoint, "infinite or NaN"),
    "scales of FP32": ("mxfp4", put(f"{UP}.scales", torch.ones(128, 4)), DamagedCheckpoint, "which are no MXFP4 codes"),
    "exponents of NaN": (
        "mxfp8",
        put(f"{UP}.scales", torch.full((128, 4), 255, dtype=BYTES)),
        DamagedCheckpoint,
        "infinite or NaN",
    ),
    "biases of no integers": ("mxfp4", put(f"{UP}.biases", SCALES), DamagedCheckpoint, "no integers that it could"),
    "global scales in BF16": (
        "nvfp4",
        put(f"{UP}.global_scale", torch.ones((), dtype=torch.bfloat16)),
        DamagedCheckpoint,
        "which are no NVFP4 codes",
    ),
    "no global scale": (
        "nvfp4",
        own({"mode": "nvfp4", "global_scale": True}),
        DamagedCheckpoint,
        "no .*up_proj.global_scale for its codes",
    ),
    "a global scale of integers": ("affine-4", own({"global_scale": True}), PrecisionError, "`global_scale` True"),
    "a global scale in words": (
        "nvfp4",
        own({"mode": "nvfp4", "global_scale": "yes"}),
        PrecisionError,
        "`global_scale` 'yes'",
    ),
    "a stack without experts": (
        "affine-4",
        put("model.layers.0.mlp.switch_mlp.up_proj.weight", torch.ones(0, 2, 2)),
        DamagedCheckpoint,
        "a stack of 0 matrices",
    ),
    "stacks of millions": (
        "affine-4",
        put("model.layers.0.mlp.switch_mlp.up_proj.weight", torch.ones(1 << 20, 0)),
        DamagedCheckpoint,
        "a stack of 1048576 matrices",
    ),
    "a family with changes of its own": (
        "affine-4",
        lambda tensors, config: config.update(model_type="falcon_h1"),
        PrecisionError,
        "codes of MLX of a 'falcon_h1'",
    ),
    "a family that is none": (
        "affine-4",
        lambda tensors, config: config.update(model_type=["llama"]),
        PrecisionError,
        "codes of MLX of a .'llama'.,",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_and_settings_that_contradict_one_another_are_one_error(tmp_path: Path, case: str) -> None:
    spelling, changed, error, match = HOSTILE[case]
    mlx_directories.make(tmp_path, spelling)
    change(tmp_path, changed)
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")


Q, OUT = "model.layers.1.self_attn.embed_q", "model.layers.1.self_attn.unembed_out"
UNFIT: dict[str, tuple[Changed, str]] = {
    "a head less": (put(f"{OUT}.weight", torch.ones(3, 24, 16)), "kv_b_proj.weight is in parts that do not fit"),
    "a latent less": (put(f"{OUT}.weight", torch.ones(4, 24, 15)), "kv_b_proj.weight is in parts that do not fit"),
    "vectors": (put(f"{Q}.weight", torch.ones(4, 16)), "kv_b_proj.weight is in parts that do not fit"),
    "numbers": (put(f"{Q}.weight", torch.ones(4)), "kv_b_proj.weight is in parts that do not fit"),
    "a head of millions": (
        lambda tensors, config: tensors.update(
            {f"{Q}.weight": torch.zeros(4, 1025, 1 << 14, dtype=BYTES), f"{OUT}.weight": torch.zeros(4, 1, 1025)}
        ),
        "kv_b_proj.weight is in parts that do not fit",
    ),
    "keys alone": (put(f"{OUT}.weight", None), "kv_b_proj.weight is in parts that do not fit"),
    "values alone": (put(f"{Q}.weight", None), "kv_b_proj.weight is in parts that do not fit"),
    "integers": (
        put(f"{Q}.weight", torch.ones(4, 16, 16).int()),
        "kv_b_proj.weight/0a-turned.weight is int32, no part of a weight",
    ),
    "the whole too": (
        put(f"{Q.replace('embed_q', 'kv_b_proj')}.weight", torch.ones(160, 16)),
        "kv_b_proj.weight is there as values",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_parts_that_make_no_weight_are_refused(tmp_path: Path, case: str) -> None:
    changed, match = UNFIT[case]
    pico.save(tmp_path, "deepseek-v3", dtype=torch.bfloat16)
    change(tmp_path, mlx_directories.rename)
    change(tmp_path, changed)
    with pytest.raises(DamagedCheckpoint, match=match):
        open_checkpoint(tmp_path)


def test_parts_of_other_ranks_make_no_weight() -> None:
    for shapes in [((4,), ()), ((4, 8), (8,)), ((), ()), ((2, 4, 8), (2, 4, 8))]:
        parts = {f"a.weight/{place}-joined.weight": shape for place, shape in enumerate(shapes)}
        with pytest.raises(DamagedCheckpoint, match="a.weight is in parts that do not fit"):
            weights_in_parts(parts, "here")


def test_a_stack_beside_one_of_its_experts_is_refused(tmp_path: Path) -> None:
    mlx_directories.make(tmp_path, "affine-4", **MOE)
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    change(tmp_path, put(name, torch.ones(64, 128)))
    with pytest.raises(DamagedCheckpoint, match=f"`{name}` is there, and is a part of a stack"):
        open_checkpoint(tmp_path)


def test_groups_that_others_read_as_twice_the_columns_are_no_weights_of_the_model(tmp_path: Path) -> None:
    mlx_directories.make(tmp_path, "affine-8")
    change(tmp_path, say(bits=4, group_size=128))
    with pytest.raises(MappingError):
        conversions.run(tmp_path, tmp_path / "bf16", "hf")


def test_exports_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    mlx_directories.make(tmp_path / "mlx", "affine-4")
    conversions.run(tmp_path / "mlx", tmp_path / "bf16", "hf")
    for source in ("mlx", "bf16"):
        conversions.carry_out(Request.export(tmp_path / source, tmp_path / f"{source}-fp8", "vllm", "dynamic"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "mlx-fp8" / name).read_bytes() == (tmp_path / "bf16-fp8" / name).read_bytes()
