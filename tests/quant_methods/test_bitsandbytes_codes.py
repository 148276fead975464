"""bitsandbytes: NF4, FP4 and LLM.int8, decoded to BF16 by every command."""

import json
from collections.abc import Callable
from pathlib import Path

import bitsandbytes_directories
import conversions
import pytest
import repository
import torch
import training
from bitsandbytes_directories import quant_state
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.bitsandbytes_codes import BitsAndBytesCodes
from precisionctl.checkpoints.decoded.methods import METHODS
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.engines.base import engines
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionctlError, PrecisionError
from precisionctl.evaluate import evaluate
from precisionctl.param import Parallelism
from precisionctl.quant_methods.coded_weights import AS_VALUES
from precisionctl.reports.inspect import describe
from precisionctl.untrusted.safe_files import LENGTHS
from precisionctl.verify.compare import compare

UP = "model.layers.0.mlp.up_proj"
GOLDEN = repository.GOLDEN / "bitsandbytes_codes.safetensors"


def change(directory: Path, changed: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changed(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")


@pytest.mark.parametrize("spelling", bitsandbytes_directories.SPELLINGS)
def test_values_are_those_of_a_slow_reader_in_bf16_and_through_megatron(tmp_path: Path, spelling: str) -> None:
    values = bitsandbytes_directories.make(tmp_path / "source", spelling)
    notes = conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1, verify=True).notes
    assert any(note.startswith("7 weights were ") and "no way back" in note for note in notes)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert len(values) == 7 and {name.rpartition(".")[2] for name in found} == {"weight"}
    for name, expected in values.items():
        assert torch.equal(found[name].view(torch.int16), expected.view(torch.int16)), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    source = open_checkpoint(tmp_path / "source")
    assert compare(source, open_checkpoint(tmp_path / "bf16")).equal
    kind = spelling.partition("-")[0].upper()
    assert describe(source)["precision"] == f"{kind} codes of bitsandbytes, read as bfloat16"
    if spelling in ("nf4-nested", "int8"):
        conversions.run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2), workers=1)
        assert compare(source, open_checkpoint(tmp_path / "megatron")).equal


def test_every_command_that_writes_says_that_there_is_no_way_back(tmp_path: Path) -> None:
    """Of codes that an export rounds again, and of those of an adapter's base."""
    base = tmp_path / "base"
    bitsandbytes_directories.make(base, "nf4")
    merged = tmp_path / "adapter"
    merged.mkdir()
    (merged / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    factors = {"A": torch.ones(2, 128), "B": torch.ones(96, 2)}
    save_file(
        {f"base_model.model.{UP}.lora_{factor}.weight": each for factor, each in factors.items()},
        merged / "adapter_model.safetensors",
    )
    for request in (
        Request(base, tmp_path / "export", "hf", "fp8", target="vllm", scheme="dynamic"),
        Request(merged, tmp_path / "values", "hf", reference=base),
        Request(merged, tmp_path / "of-adapter", "hf", "fp8", target="vllm", scheme="nvfp4a16", reference=base),
    ):
        notes = plan_command(request).notes
        of_codes = [note for note in notes if "no way back" in note]
        assert of_codes == [
            "7 weights were NF4 codes of bitsandbytes, read as bfloat16. There is no way back to those codes."
        ], request


CASES = sorted(name.removesuffix(".decoded") for name in load_file(GOLDEN) if name.endswith(".decoded"))


@pytest.mark.parametrize("case", CASES)
def test_what_bitsandbytes_has_coded_is_what_it_makes_of_it(case: str) -> None:
    """But for the sign of FP4's second zero, which its vector code and its scalar code give another one."""
    stored = StoredTensors({name: (GOLDEN, tensor) for name, tensor in read_header(GOLDEN).items()})
    found = read_tensor(
        BitsAndBytesCodes(stored, {"quantization_config": {"quant_method": "bitsandbytes"}}, GOLDEN), f"{case}.weight"
    )
    assert torch.equal(found, load_file(GOLDEN)[f"{case}.decoded"].bfloat16())


def test_there_is_a_golden_weight_of_each_table_dtype_and_way_to_store_absmaxes() -> None:
    dtypes = ("bfloat16", "float16", "float32")
    four = {f"{table}-{dtype}{nested}" for table in ("nf4", "fp4") for dtype in dtypes for nested in ("", "-nested")}
    assert {*CASES} == four | {"int8"}


@pytest.mark.parametrize("spelling", ["nf4-nested", "int8"])
def test_how_rows_are_cut_does_not_matter(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an expert whose rows begin within blocks, and one in piece by piece."""
    sizes = {"moe_intermediate_size": 80, "num_hidden_layers": 2}
    values = bitsandbytes_directories.make(tmp_path, spelling, "qwen3-moe", **sizes)
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", 300)
    reader = open_checkpoint(tmp_path)
    name = next(name for name in values if ".experts.1.down_proj" in name)
    assert torch.equal(read_tensor(reader, name), values[name])
    for row, rows in ((0, 1), (31, 2), (33, 64), (127, 1)):
        assert torch.equal(read_rows(reader, name, row, rows), values[name][row : row + rows])


@pytest.mark.parametrize("part", ["", ".absmax", ".nested_absmax", ".nested_quant_map"])
def test_verify_finds_a_bit_that_has_flipped_anywhere(tmp_path: Path, part: str) -> None:
    bitsandbytes_directories.make(tmp_path / "source", "nf4-nested")
    conversions.run(tmp_path / "source", tmp_path / "bf16", "hf", workers=1)

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight{part}"].view(torch.uint8).view(-1)[2] ^= 0x40

    change(tmp_path / "source", flip)
    found = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16"))
    assert [each.name for each in found.tensors if not each.equal] == [f"{UP}.weight"]


def test_modules_that_were_skipped_are_values_beside_codes(tmp_path: Path) -> None:
    values = bitsandbytes_directories.make(tmp_path, "nf4", quantized=lambda name: "mlp" in name)
    reader = open_checkpoint(tmp_path)
    assert len(values) == 3 and reader.specs["model.layers.0.self_attn.q_proj.weight"].shape == (128, 128)


def said(**changed: object) -> Callable[[dict[str, Tensor]], None]:
    """A quant_state that says something else; a key of None is not there."""

    def put(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.startswith(f"{UP}.weight.quant_state"))
        held = json.loads(bytes(tensors[name].tolist())) | changed
        tensors[name] = quant_state({key: value for key, value in held.items() if value is not None})

    return put


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    """Another tensor in the place of one, or none."""

    def changed(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{UP}.{name}", None)
        tensors.update({} if tensor is None else {f"{UP}.{name}": tensor})

    return changed


STATE = "weight.quant_state.bitsandbytes__nf4"
BYTE = torch.zeros((), dtype=torch.uint8)
HOSTILE: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], type[PrecisionctlError], str]] = {
    "no state": ("nf4", put(STATE, None), DamagedCheckpoint, "no quant_state says what of"),
    "a long state": ("nf4", put(STATE, torch.full((5000,), 32, dtype=torch.uint8)), DamagedCheckpoint, "4096 bytes"),
    "a state of words": ("nf4", put(STATE, torch.zeros(30)), DamagedCheckpoint, "is float32 of shape"),
    "no JSON": ("nf4", put(STATE, torch.full((30,), 200, dtype=torch.uint8)), DamagedCheckpoint, "makes no sense|JSON"),
    "an array": ("nf4", put(STATE, quant_state([])), DamagedCheckpoint, "not a JSON object"),  # type: ignore[arg-type]
    "two states": (
        "nf4",
        put("weight.quant_state.bitsandbytes__fp4", quant_state({})),
        DamagedCheckpoint,
        "two quant_states|makes no sense",
    ),
    "a table of no name": ("nf4", said(quant_type="nf5"), DamagedCheckpoint, "quant_type 'nf5'"),
    "another table": ("nf4", said(quant_type="fp4"), DamagedCheckpoint, "quant_type 'fp4'"),
    "a key too many": ("nf4", said(offset=1.0), DamagedCheckpoint, "keys .*offset"),
    "a key less": ("nf4", said(blocksize=None), DamagedCheckpoint, "keys"),
    "blocks of nothing": ("nf4", said(blocksize=0), DamagedCheckpoint, "blocksize 0"),
    "blocks of True": ("nf4", said(blocksize=True), DamagedCheckpoint, "blocksize True"),
    "a dtype of no name": ("nf4", said(dtype="float64"), DamagedCheckpoint, "dtype 'float64'"),
    "a dtype that is a list": ("nf4", said(dtype=["float32"]), DamagedCheckpoint, r"dtype \['float32'\]"),
    "a shape of three": ("nf4", said(shape=[2, 48, 128]), DamagedCheckpoint, "weight of shape"),
    "a shape of nothing": ("nf4", said(shape=[0, 128]), DamagedCheckpoint, "weight of shape"),
    "a huge shape": ("nf4", said(shape=[1 << 62, 1 << 62]), DamagedCheckpoint, "for codes of"),
    "a shape below zero": ("nf4", said(shape=[-96, -128]), DamagedCheckpoint, "as sizes"),
    "a shape of fractions": ("nf4", said(shape=[96.0, 128]), DamagedCheckpoint, "as sizes"),
    "a row more": ("nf4", said(shape=[97, 128]), DamagedCheckpoint, "for codes of"),
    "an offset of NaN": ("nf4-nested", said(nested_offset=float("nan")), DamagedCheckpoint, "nested_offset nan"),
    "an offset of a name": ("nf4-nested", said(nested_offset="0"), DamagedCheckpoint, "nested_offset '0'"),
    "an endless offset": ("nf4-nested", said(nested_offset=10**400), DamagedCheckpoint, "makes no sense"),
    "nested in FP64": ("nf4-nested", said(nested_dtype="float64"), DamagedCheckpoint, "nested_dtype 'float64'"),
    "no codes": ("nf4", put("weight", None), DamagedCheckpoint, "no .*up_proj.weight for its codes"),
    "codes the other way": (
        "nf4",
        put("weight", torch.zeros(1, 6144, dtype=torch.uint8)),
        DamagedCheckpoint,
        "up_proj.weight is uint8 of shape",
    ),
    "no absmaxes": ("nf4", put("weight.absmax", None), DamagedCheckpoint, "no .*up_proj.weight.absmax"),
    "absmaxes that are codes": (
        "nf4",
        put("weight.absmax", torch.zeros(192, dtype=torch.uint8)),
        DamagedCheckpoint,
        "absmax is uint8",
    ),
    "an absmax less": ("nf4", put("weight.absmax", torch.ones(191)), DamagedCheckpoint, r"not float32 of \(192,\)"),
    "absmaxes of absmaxes that are none": (
        "nf4",
        put("weight.nested_absmax", torch.ones(1)),
        DamagedCheckpoint,
        "no codes|no quant_state",
    ),
    "a table of fifteen": ("nf4", put("weight.quant_map", torch.ones(15)), DamagedCheckpoint, "quant_map is float32"),
    "a stranger's table": ("nf4", put("weight.quant_map", torch.ones(16)), PrecisionError, "is not NF4's"),
    "a table of NaN": ("nf4", put("weight.quant_map", torch.full((16,), torch.nan)), PrecisionError, "is not NF4's"),
    "an absmax of NaN": (
        "nf4",
        put("weight.absmax", torch.full((192,), torch.nan)),
        DamagedCheckpoint,
        "infinite or NaN",
    ),
    "an absmax beyond FP16": (
        "nf4-float16",
        put("weight.absmax", torch.full((192,), 1e9)),
        DamagedCheckpoint,
        "infinite or NaN",
    ),
    "a nested table of NaN": (
        "nf4-nested",
        put("weight.nested_quant_map", torch.full((256,), torch.nan)),
        DamagedCheckpoint,
        "infinite or NaN",
    ),
    "no SCB": ("int8", put("SCB", None), DamagedCheckpoint, "no .*up_proj.SCB"),
    "an SCB of FP16": ("int8", put("SCB", torch.ones(96).half()), DamagedCheckpoint, "SCB is float16"),
    "an SCB too short": ("int8", put("SCB", torch.ones(95)), DamagedCheckpoint, r"not float32 of \(96,\)"),
    "an SCB of NaN": ("int8", put("SCB", torch.full((96,), torch.inf)), DamagedCheckpoint, "infinite or NaN"),
    "an SCB of values": ("int8", put("weight", torch.ones(96, 128)), DamagedCheckpoint, "weight is float32"),
    "another order": ("int8", put("weight_format", BYTE + 1), PrecisionError, "in another order than rows"),
    "no order": ("int8", put("weight_format", BYTE.view(1)), DamagedCheckpoint, "weight_format is uint8 of shape"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_one_another_are_one_error(tmp_path: Path, case: str) -> None:
    spelling, changed, error, match = HOSTILE[case]
    bitsandbytes_directories.make(tmp_path, spelling)
    change(tmp_path, changed)
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")


def test_older_directories_have_no_order_of_codes(tmp_path: Path) -> None:
    values = bitsandbytes_directories.make(tmp_path, "int8")
    change(tmp_path, put("weight_format", None))
    assert torch.equal(read_tensor(open_checkpoint(tmp_path), f"{UP}.weight"), values[f"{UP}.weight"])


def test_headers_alone_do_not_say_the_shapes_and_what_to_do_is_said(tmp_path: Path) -> None:
    bitsandbytes_directories.make(tmp_path, "nf4")
    file = tmp_path / "model.safetensors"
    (tmp_path / LENGTHS).write_text(json.dumps({file.name: file.stat().st_size}))
    with file.open("r+b") as opened:
        opened.truncate(min(tensor.offset for tensor in read_header(file).values()))
    with pytest.raises(CheckpointError, match="only the header") as caught:
        open_checkpoint(tmp_path)
    assert "inspect --fp8" in str(caught.value.do)


def test_gpt_2_whose_linears_are_transposed_themselves_is_refused_by_name(tmp_path: Path) -> None:
    bitsandbytes_directories.make(tmp_path, "nf4", "gpt2", hidden_size=64)
    with pytest.raises(PrecisionError, match="bitsandbytes for GPT-2"):
        open_checkpoint(tmp_path)


def test_exports_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    bitsandbytes_directories.make(tmp_path / "nf4", "nf4-nested")
    conversions.run(tmp_path / "nf4", tmp_path / "bf16", "hf")
    for source in ("nf4", "bf16"):
        conversions.carry_out(Request.export(tmp_path / source, tmp_path / f"{source}-fp8", "vllm", "dynamic"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "nf4-fp8" / name).read_bytes() == (tmp_path / "bf16-fp8" / name).read_bytes()


def test_training_on_begins_with_the_decoded_values_and_eval_computes_with_them(tmp_path: Path) -> None:
    training.make_text(tmp_path / "text.txt")
    words = training.make_source(tmp_path / "words")
    bitsandbytes_directories.make(tmp_path / "nf4", "nf4-nested", vocab_size=80)
    conversions.run(tmp_path / "nf4", tmp_path / "bf16", "hf")
    for folder in ("nf4", "bf16"):
        for file in words.glob("tokenizer*"):
            (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    found = []
    for folder in ("nf4", "bf16"):
        source = tmp_path / folder
        loss = evaluate(open_checkpoint(source), tmp_path / "text.txt", sequence_length=32).loss
        made = training.settings(source, tmp_path / "text.txt", tmp_path / f"run-{folder}", train__steps=1)
        found.append((loss, training.run(made)[2]))
    assert found[0] == found[1] and len(found[0][1]) == 1


def test_an_adapter_is_merged_with_the_decoded_values_of_its_base(tmp_path: Path) -> None:
    """As QLoRA trains one."""
    bitsandbytes_directories.make(tmp_path / "nf4", "nf4-nested")
    conversions.run(tmp_path / "nf4", tmp_path / "bf16", "hf")
    (tmp_path / "adapter").mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    generator = torch.Generator().manual_seed(1)
    factors = {"A": torch.randn(4, 128, generator=generator), "B": torch.randn(96, 4, generator=generator)}
    named = {f"base_model.model.{UP}.lora_{each}.weight": tensor * 0.1 for each, tensor in factors.items()}
    save_file(named, tmp_path / "adapter" / "adapter_model.safetensors")
    for base in ("nf4", "bf16"):
        conversions.run(tmp_path / "adapter", tmp_path / f"{base}-merged", "hf", reference=tmp_path / base)
    merged, of_values = (load_file(tmp_path / f"{base}-merged" / "model.safetensors") for base in ("nf4", "bf16"))
    assert merged.keys() == of_values.keys()
    assert all(torch.equal(tensor, of_values[name]) for name, tensor in merged.items())
    assert not torch.equal(merged[f"{UP}.weight"], load_file(tmp_path / "bf16" / "model.safetensors")[f"{UP}.weight"])


@pytest.mark.parametrize("target", sorted(engines()))
def test_that_an_engine_has_no_rules_for_them_is_no_verdict(tmp_path: Path, target: str) -> None:
    """But an answer of its own, to people and programs, with the exit code of what cannot be asked."""
    bitsandbytes_directories.make(tmp_path / "nf4", "nf4-nested")
    asked = CliRunner().invoke(main, ["verify", str(tmp_path / "nf4"), "--target", target, "--json"])
    error = json.loads(asked.stdout)["error"]
    assert asked.exit_code == 2 and error["kind"] == "RecipeError"
    assert f"no rules of {engines()[target].title} for codes of bitsandbytes" in error["what"]
    assert "`convert --to hf`" in error["do"]


def test_each_method_of_codes_that_are_values_has_a_reader() -> None:
    assert METHODS.keys() == {*AS_VALUES}
