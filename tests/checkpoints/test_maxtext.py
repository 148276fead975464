"""MaxText's parameters are those that its own converter makes of them (tests/golden/maxtext.py), in any of Orbax's
forms. tests/peers has Orbax itself."""

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conversions
import orbax_files
import pico
import pytest
import repository
import tiny_wrappers
import torch
from orbax_files import State
from safetensors.torch import load_file
from soaking import in_soak
from torch import Tensor

from precisionctl.checkpoints.base import NO_HINTS, Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.orbax.crc32c import crc32c
from precisionctl.checkpoints.orbax.reader import OrbaxReader
from precisionctl.checkpoints.run_reader import of_run, run_of
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    PrecisionctlError,
    UnknownArchitecture,
    UnmappedTensor,
)
from precisionctl.param import state_name
from precisionctl.reports.inspect import describe

GOLDEN = repository.GOLDEN / "maxtext"
SIZES = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HEADS = {"head_dim": 4}
TWO = {"num_experts_per_tok": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3": HEADS,
    "qwen2": {},
    "qwen3-moe": HEADS | TWO | {"num_experts": 2, "moe_intermediate_size": 4, "mlp_only_layers": []},
    "mixtral": HEADS | TWO | {"num_local_experts": 2},
    "gemma2": HEADS | {"num_hidden_layers": 2},
    "gemma3": HEADS | {"num_hidden_layers": 7},
    "deepseek-v3": {
        "num_key_value_heads": 2,
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "n_routed_experts": 2,
        "moe_intermediate_size": 4,
        "n_group": 1,
        "topk_group": 1,
        **TWO,
    },
    "olmo3": HEADS,
}


def stored(family: str) -> State:
    return load_file(GOLDEN / f"{family}-stored.safetensors")


def reference(tmp_path: Path, family: str) -> Path:
    """The config of the model that the golden files are of."""
    pico.save(tmp_path / "reference", family, **{**SIZES, **FAMILIES.get(family, {})})
    return tmp_path / "reference"


def whole(state: State, **beside: Tensor) -> State:
    """A state as MaxText saves it."""
    return {f"params.params.{name}": one for name, one in state.items()} | beside


def unscanned(state: State) -> State:
    """Layers one by one, under the names that they have then (decoders.py of MaxText)."""
    found: State = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"decoder\.((?:dense_|moe_)?layers)\.(?:layers_(\d)\.)?(.+)", name)
        left = re.fullmatch(r"decoder\.layers_remainder\.layers_(\d)\.(.+)", name)
        if left:
            found[f"decoder.layers_{6 + int(left[1])}.{left[2]}"] = tensor
        elif match:
            block = 1 if match[2] is None else len({one.split(".")[2] for one in state if ".layers.layers_" in one})
            for at, layer in enumerate(tensor.unbind(1)):
                found[f"decoder.{match[1]}_{block * at + int(match[2] or 0)}.{match[3]}"] = layer.contiguous()
        else:
            found[name] = tensor
    return found


def of_nnx(state: State) -> State:
    """As a state of NNX has it, with what it has beside weights."""
    found = {f"base.{re.sub(r'layers_(?=[0-9])', 'layers.', name)}.value": one for name, one in state.items()}
    return found | {"base.decoder.rngs.params.count.value": torch.tensor(3, dtype=torch.int32)}


FORMS = {
    "scanned": whole,
    "unscanned": lambda state: whole(unscanned(state)),
    "nnx": lambda state: of_nnx(unscanned(state)),
}


def assert_expected(converted: Path, family: str) -> None:
    ours = load_file(converted / "model.safetensors")
    theirs = load_file(GOLDEN / f"{family}-expected.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


CASES = [(family, form) for family in FAMILIES for form in ("scanned", "unscanned")]
QUICK = [case for case in CASES if case[1] == "scanned" or case[0] in ("gemma2", "gemma3")]


@pytest.mark.parametrize(
    ("family", "form"), [*QUICK, ("gemma3", "nnx"), *in_soak(*(case for case in CASES if case not in QUICK))]
)
def test_its_parameters_are_what_its_own_converter_makes_of_them(tmp_path: Path, family: str, form: str) -> None:
    orbax_files.write(tmp_path / "steps" / "5" / "items", FORMS[form](stored(family)))
    conversions.run(tmp_path / "steps", tmp_path / "out", "hf", reference=reference(tmp_path, family))
    assert_expected(tmp_path / "out", family)


FILES: dict[str, dict[str, Any]] = {
    "files of zarr 2": {"ocdbt": False, "form": 2},
    "files of zarr 3": {"ocdbt": False},
    "zarr 2 in OCDBT": {"form": 2},
    "no shards": {"sharded": False, "parts": 3},
    "one chunk": {"parts": 1},
}


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("zstd", [False, True])
def test_any_of_the_forms_that_orbax_has(tmp_path: Path, files: str, zstd: bool) -> None:
    if zstd:
        pytest.importorskip("zstandard")
    orbax_files.write(tmp_path / "step", whole(stored("llama-3")), zstd=zstd, **FILES[files])
    conversions.run(tmp_path / "step", tmp_path / "out", "hf", reference=reference(tmp_path, "llama-3"), workers=2)
    assert_expected(tmp_path / "out", "llama-3")


def test_what_orbax_itself_has_saved(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    conversions.run(GOLDEN / "orbax", tmp_path / "out", "hf", reference=reference(tmp_path, "llama-3"))
    assert_expected(tmp_path / "out", "llama-3")
    assert open_checkpoint(GOLDEN / "orbax").iteration == 7


def test_the_checksum_is_that_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


STEP = {"step": torch.tensor(7, dtype=torch.int32)}
ADAM = "opt_state.0."


def with_adam(state: State) -> State:
    """Moments that are the weights themselves."""
    moments = {f"{ADAM}{kind}.params.{name}": one for name, one in state.items() for kind in ("mu", "nu")}
    return whole(state, **moments, **STEP, **{f"{ADAM}count": STEP["step"], "opt_state.2.count": STEP["step"]})


def opened(step: Path, given: Path | None) -> OrbaxReader:
    hints = NO_HINTS if given is None else Hints(companions=read_companions(given), reference=given)
    reader = open_checkpoint(step, hints=hints)
    assert isinstance(reader, OrbaxReader)
    return reader


@pytest.mark.parametrize(
    ("family", "weight", "factor"),
    [("llama-3", "layers.1.self_attn.q_proj", 2.0), ("gemma2", "embed_tokens", 8**-0.5), ("qwen3-moe", "norm", 1.0)],
)
def test_a_moment_is_divided_by_what_its_weight_is_multiplied_by(
    tmp_path: Path, family: str, weight: str, factor: float
) -> None:
    state = {name: one.float() for name, one in stored(family).items()}
    orbax_files.write(tmp_path / "steps" / "7" / "items", with_adam(state))
    reader = opened(tmp_path / "steps", reference(tmp_path, family))
    name = f"model.{weight}.weight"
    value = read_tensor(reader, name)
    for kind, power in (("exp_avg", 2), ("exp_avg_sq", 3)):
        moments = SimpleNamespace(specs=reader.optimizer_specs, chunks=reader.chunks)
        torch.testing.assert_close(read_tensor(moments, state_name(kind, name)), value / factor**power)
    assert reader.trainer_run.updates == reader.iteration == 7


def defaults_told(notes: Iterable[str]) -> dict[str, object]:
    told = [note for note in notes if "PyTorch's defaults" in note]
    found = re.findall(r"(\w+) ([\d.e-]+|\(.*?\))(?:, |\.$)", told[0].partition(": ")[2]) if told else []
    return {key: ast.literal_eval(value) for key, value in found}


def made_settings(path: Path) -> Mapping[str, object]:
    reader = open_checkpoint(path)
    assert of_run(reader)
    return run_of(reader).settings


def test_a_run_goes_on_in_pytorch(tmp_path: Path) -> None:
    orbax_files.write(tmp_path / "step", with_adam(stored("qwen2")))
    given = reference(tmp_path, "qwen2")
    done = conversions.run(tmp_path / "step", tmp_path / "dcp", "hf", container="dcp", reference=given, verify=True)
    assert any("AdamW's settings, which are in MaxText's configuration" in note for note in done.notes)
    adamw = inspect.signature(torch.optim.AdamW).parameters
    defaults = {key: adamw[key].default for key in ("lr", "betas", "eps", "weight_decay")}
    assert defaults_told(done.notes) == defaults
    assert any("the result's initial_lr is its lr, 0.001." in note for note in done.notes)
    assert made_settings(tmp_path / "dcp") == defaults | {"initial_lr": defaults["lr"]}
    done = conversions.run(tmp_path / "step", tmp_path / "megatron", "megatron", "bf16", reference=given)
    needed = {key: defaults[key] for key in ("betas", "eps")}  # rate and decay are its scheduler's
    assert defaults_told(done.notes) == needed and made_settings(tmp_path / "megatron") == needed
    again = conversions.run(tmp_path / "megatron", tmp_path / "again", "hf", container="dcp")
    assert defaults_told(again.notes).keys() == {"lr", "weight_decay"}
    done = conversions.run(tmp_path / "step", tmp_path / "ds", "hf", container="deepspeed-universal", reference=given)
    assert not defaults_told(done.notes) and not made_settings(tmp_path / "ds")  # each group keeps its run's
    made = open_checkpoint(tmp_path / "dcp")
    assert isinstance(made, DcpModelReader) and made.iteration == 7
    assert made.optimizer_specs.keys() >= opened(tmp_path / "step", given).optimizer_specs.keys() != set()


def test_a_wrapper_has_its_towers_from_the_reference(tmp_path: Path) -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    text = {**SIZES, **FAMILIES["gemma3"], "layer_types": layers}
    tiny_wrappers.save(tmp_path / "reference", "gemma3", **text)
    orbax_files.write(tmp_path / "step", whole(stored("gemma3")))
    conversions.run(tmp_path / "step", tmp_path / "out", "hf", reference=tmp_path / "reference")
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("reference", "out"))
    of_text = load_file(GOLDEN / "gemma3-expected.safetensors")
    expected = theirs | {f"language_model.{name}": tensor for name, tensor in of_text.items()}
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def test_what_stays_behind_is_said(tmp_path: Path) -> None:
    others = {"opt_state.mu.params.decoder.decoder_norm.scale": torch.ones(8), "nnx_aux.rngs.count": STEP["step"]}
    orbax_files.write(tmp_path / "step", whole(stored("qwen2"), **others))
    given = reference(tmp_path, "qwen2")
    notes = " ".join(conversions.run(tmp_path / "step", tmp_path / "out", "hf", reference=given).notes)
    for words in ("2 arrays of its optimizer", "6 rows with which MaxText pads", "which are not optax's AdamW"):
        assert words in notes


def test_which_order_of_rotary_pairs_was_taken_is_said(tmp_path: Path) -> None:
    """Nothing in a state tells Llama 3 from Llama 3.1, of which MaxText has another one."""
    orbax_files.write(tmp_path / "step", whole(stored("llama-3")))
    plain = {"rope_type": "default", "rope_theta": 5e5}
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
    for settings, order in ((plain, "in the halves of a head"), (scaled, "beside each other")):
        given = tmp_path / order
        pico.save(given, "llama-3", **SIZES, **HEADS, rope_parameters=settings)
        (note,) = (note for note in opened(tmp_path / "step", given).notes() if "rotary pair" in note)
        assert order in note


def test_without_a_reference_it_shows_what_is_stored(tmp_path: Path) -> None:
    orbax_files.write(tmp_path / "step", whole(stored("qwen2"), **STEP))
    said = describe(opened(tmp_path / "step", None))
    assert (said["container"], said["iteration"], said["architecture"]) == ("orbax", 7, None)
    assert said["parameters"] == sum(one.numel() for one in stored("qwen2").values())
    with pytest.raises(PrecisionctlError, match="does not say which model it is"):
        conversions.run(tmp_path / "step", tmp_path / "out", "hf")


KERNEL = "decoder.layers.self_attention.query.kernel"
WRONG: dict[str, tuple[str, State, type[PrecisionctlError], str]] = {
    "an unknown parameter": (
        "llama-3",
        {"decoder.layers.self_attention.sinks": torch.ones(2, 2)},
        UnmappedTensor,
        r"`params\.params\.decoder\.layers\.self_attention\.sinks` is no parameter that MaxText has of a llama",
    ),
    "an unknown family": ("phi3", {}, UnknownArchitecture, "a phi3, whose parameters' names in MaxText"),
    "another axis": (
        "llama-3",
        {KERNEL: stored("llama-3")[KERNEL].transpose(0, 1)},
        DamagedCheckpoint,
        r"is \[2, 8, 2, 4\], and not a parameter with 2 layers in dimension 1",
    ),
    "other heads": (
        "llama-3",
        {KERNEL: stored("llama-3")[KERNEL].reshape(8, 2, 8, 1)},
        DamagedCheckpoint,
        "has 2 such heads",
    ),
    "a layer too many": (
        "llama-3",
        {"decoder.layers_2.mlp.wo.kernel": torch.ones(12, 8)},
        UnmappedTensor,
        r"layers_2\.mlp\.wo\.kernel` is no parameter",
    ),
    "a tensor twice": (
        "llama-3",
        {"decoder.layers_1.mlp.wo.kernel": torch.ones(12, 8)},
        DamagedCheckpoint,
        r"are both `model\.layers\.1\.mlp\.down_proj\.weight`",
    ),
    "codes": (
        "llama-3",
        {"decoder.decoder_norm.scale": torch.ones(8).to(torch.float8_e4m3fn)},
        PrecisionctlError,
        "FP8",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_is_not_has_one_error_that_names_it(tmp_path: Path, wrong: str) -> None:
    family, changes, error, words = WRONG[wrong]
    orbax_files.write(tmp_path / "step", whole(stored("llama-3") | changes))
    given = reference(tmp_path, family)
    with pytest.raises(error, match=words):
        conversions.run(tmp_path / "step", tmp_path / "out", "hf", reference=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["params.token_embedder.embedding", "base.token_embedder.embedding.value"])
def test_two_arrays_of_one_parameter_are_refused(tmp_path: Path, name: str) -> None:
    orbax_files.write(tmp_path / "step", whole(stored("llama-3"), **{name: torch.ones(16, 8)}))
    with pytest.raises(DamagedCheckpoint, match="are both `token_embedder.embedding`"):
        opened(tmp_path / "step", reference(tmp_path, "llama-3"))


def test_counts_that_are_none_are_refused(tmp_path: Path) -> None:
    state = with_adam(stored("qwen2"))
    orbax_files.write(tmp_path / "negative", state | {"step": torch.tensor(-5, dtype=torch.int32)})
    with pytest.raises(DamagedCheckpoint, match="-5 as a number"):
        _ = opened(tmp_path / "negative", reference(tmp_path, "qwen2")).iteration
    orbax_files.write(tmp_path / "two", state | {"opt_state.inner_state.0.count": STEP["step"]})
    with pytest.raises(PrecisionctlError, match="are both counts of updates"):
        _ = opened(tmp_path / "two", tmp_path / "reference").trainer_run


def test_of_several_steps_one_may_be_chosen(tmp_path: Path) -> None:
    for step in ("7", "9"):
        orbax_files.write(tmp_path / "steps" / step / "items", whole(stored("qwen2")))
    hints = Hints(companions=read_companions(reference(tmp_path, "qwen2")))
    assert [open_checkpoint(tmp_path / "steps", step, hints).iteration for step in (None, 7)] == [9, 7]
    with pytest.raises(CheckpointError, match="step 8 is not there.*7, 9"):
        open_checkpoint(tmp_path / "steps", 8, hints)
    with pytest.raises(CheckpointError, match="no iterations to choose from"):
        open_checkpoint(tmp_path / "steps" / "7", 7, hints)
