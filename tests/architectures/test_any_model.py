"""Models that no table here describes: decoded, encoded, inspected and verified by a table that is read off them."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import any_models
import fp8_directories
import pico
import pytest
import torch
import torch.distributed.checkpoint as dcp
from any_models import assert_as_tabled, check_there_and_back, export, same, stored, untabled
from conversions import carry_out, run, tree
from safetensors.torch import save_file
from soaking import few, in_soak
from torch.distributed.checkpoint import FileSystemReader
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from precisionctl.architectures.families import read_model
from precisionctl.architectures.read_off import may_be_asked_for, rows, why_not_gemms
from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.estimate import Estimate
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules import names_in_memory
from precisionctl.engines.rules.ignore_lists import BY_NAME_OR_REGEX
from precisionctl.errors import DamagedCheckpoint, MissingFp8State, PrecisionError, RecipeError, UnknownArchitecture
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS, Precision
from precisionctl.readiness.assess import assess
from precisionctl.reports import plan as plan_report
from precisionctl.reports.inspect import describe
from precisionctl.reports.readiness import advice
from precisionctl.reports.verify import verdict
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

SHOWN = {
    "qwen3_next": "dynamic",  # gated delta net, experts one by one
    "qwen3_vl_moe": "block",  # a wrapper; experts in one tensor
    "gemma3": "mxfp8",  # a wrapper with the older prefix
    "bamba": "dynamic",  # state-space layers; infinity in config.json
    "t5": "block",  # encoder and decoder
}


@pytest.mark.parametrize("kind", few(SHOWN, "qwen3_next", "t5"))
def test_codes_are_those_of_a_slow_reference_and_decode_to_its_values(tmp_path: Path, kind: str) -> None:
    any_models.save(tmp_path / "source", kind)
    check_there_and_back(tmp_path / "source", tmp_path, SHOWN[kind])


@pytest.mark.parametrize("kind", ["glm4_moe", "gemma3"])
def test_transformers_computes_with_an_export_what_it_does_with_our_decoding_of_it(tmp_path: Path, kind: str) -> None:
    model = any_models.save(tmp_path / "source", kind)
    export(tmp_path / "source", tmp_path / "fp8", "block", "transformers")
    run(tmp_path / "fp8", tmp_path / "back", "hf", "bf16", workers=1)
    coded, decoded = (any_models.load_whole(type(model), tmp_path / name) for name in ("fp8", "back"))
    assert torch.equal(any_models.logits(coded), any_models.logits(decoded))


AS_TABLED = ("llama-all-biases", "qwen3-moe", "phi3", "nemotron-biases", "gemma3", "gpt-oss", "deepseek-v3", "gpt-neox")
"""Of each way to lay out a layer one family; tests/soak has them all."""


@pytest.mark.parametrize("family", AS_TABLED)
def test_a_family_has_the_same_bytes_by_its_own_table(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16)
    assert_as_tabled(tmp_path, "dynamic", monkeypatch)


@pytest.mark.parametrize("spelling", ["compressed-tensor", *in_soak("modelopt-tensor")])
def test_what_is_static_has_the_same_scales_by_its_own_table(
    tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8_directories.make(tmp_path / "source", spelling, family="mixtral")
    assert_as_tabled(tmp_path, "static", monkeypatch)


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that gets a table one day is one without, here."""
    monkeypatch.setattr(huggingface, "read_model", untabled)


def matrices(*names: str, shape: tuple[int, ...] = (64, 32), dtype: DType = DType.bfloat16) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, dtype) for name in names}


def test_what_is_no_gemm_is_told_from_what_has_almost_its_name() -> None:
    pairs = {
        "model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight": "model.layers.0.mlp.shared_expert.gate_up_proj.weight",
        "model.layers.0.linear_attn.in_proj_ba.weight": "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "model.layers.0.self_attn.indexer.wq_b.weight": "model.layers.0.self_attn.wq_b.weight",
        "model.layers.0.self_attn.q_norm.weight": "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mixer.dt_proj.weight": "model.layers.0.mixer.in_proj.weight",
        "lm_head.weight": "model.layers.0.mlp.experts.3.down_proj.weight",
        "model.layers.61.embed_tokens.weight": "model.layers.61.self_attn.o_proj.weight",
        "model.layers.61.eh_proj.weight": "model.layers.60.self_attn.o_proj.weight",
        "model.layers.61.shared_head.head.weight": "model.layers.61.mlp.experts.gate_up_proj[0]",
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": "model.decoder.layers.0.fc1.weight",
        "model.layers.0.mlp.experts.gate_up_proj_bias[1]": "transformer.h.0.attn.c_attn.weight",
    }
    reasons = why_not_gemms(matrices(*pairs, *pairs.values()))
    assert reasons.keys() == pairs.keys() - {"model.layers.0.mlp.experts.gate_up_proj_bias[1]"} | set()


NEVER = {
    "a norm": "ln ln_f q_norm input_layernorm norm1",
    "an embedding": "embed_tokens word_embeddings patch_embedding emb tok_emb wte wpe position_bias "
    "decoder_position_bias relative_attention_bias rel_pos rel_pos_h",
    "a head": "head lm_head",
    "of multi-token prediction": "eh_proj",
}
UNLESS_ASKED = {
    "of a tower or projector": "vision_tower visual audio_tower speech_encoder image_encoder multi_modal_projector "
    "connector resampler aligner merger vit siglip clip mm_input_projection",
    "a router or gate": "gate wg wgate gate_attn shared_expert_gate f_gate_preact router moe_router in_proj_ba "
    "in_proj_b in_proj_a f_a_proj f_b_proj a_proj b_proj f_proj g_proj",
    "of an indexer": "indexer compressor",
    "of a state-space model's step": "x_proj dt_proj",
    "of a convolution": "conv conv1d conv2d conv3d q_conv1d",
    "of a residual connection": "attn_hyper_connection hyper_connections altup altup_projections",
}
GEMMS = """q_proj k_proj v_proj o_proj qkv_proj query_key_value wq_b kv_b_proj gate_proj up_proj down_proj gate_up_proj
fc1 fc2 c_fc w1 w2 out_proj in_proj in_proj_qkvz dense dense_h_to_4h linear_1 wo wi_0 conversation clipped""".split()
"""Names of modules as models have them."""


def test_every_word_of_what_is_no_gemm_is_known_and_no_other() -> None:
    for reasons, asked_for in ((NEVER, False), (UNLESS_ASKED, True)):
        for why, words in reasons.items():
            for word in words.split():
                last, inner = f"model.layers.0.{word}.weight", f"model.layers.0.{word}.fc1.weight"
                found = why_not_gemms(matrices(last, inner))
                assert found.get(last) == why and may_be_asked_for(found[last]) is asked_for, word
                assert found.get(inner) == (why if asked_for else None), word
    gemms = [f"model.layers.0.{word}.weight" for word in GEMMS]
    assert why_not_gemms(matrices(*gemms)) == {}


def test_a_gemm_is_a_matrix_of_values_in_a_layer() -> None:
    name = "model.layers.0.q_proj.weight"
    for dtype in (DType.bfloat16, DType.float16, DType.float32, DType.float8_e4m3fn):
        assert why_not_gemms(matrices(name, dtype=dtype)) == {}
    assert why_not_gemms(matrices(name, dtype=DType.int8)) == {name: "no values"}
    for shape in ((64,), (0, 32), (64, 0), (4, 64, 32)):
        assert why_not_gemms(matrices(name, shape=shape)) == {name: "no matrix of a linear"}
    assert why_not_gemms(matrices("model.layers.0.q_proj.table")) == {
        "model.layers.0.q_proj.table": "no matrix of a linear"
    }
    (outside,) = why_not_gemms(matrices("model.proj.weight")).values()
    assert outside == "outside of the layers" and may_be_asked_for(outside)
    assert not may_be_asked_for("no values") and not may_be_asked_for("stored as [in, out]")


def test_beside_a_language_model_every_other_part_is_a_tower() -> None:
    names = "model.language_model.layers.0.fc1.weight", "mtp.layers.0.fc1.weight", "model.eyes.layers.0.fc1.weight"
    assert why_not_gemms(matrices(*names)) == {names[2]: "of a tower or projector"}
    assert why_not_gemms(matrices(*names[1:])) == {}


def test_a_table_that_is_read_off_keeps_what_is_fp32_for_a_reason_and_counts_as_people_do() -> None:
    keeping = ["A_log", "D", "dt_bias", "e_score_correction_bias", "correction_bias", "expert_bias", "gate.bias"]
    keeping += ["hc_attn_fn", "hc_ffn_scale", "attn_hc.base", "hc_head.hc_fn", "attn_sink", "sinks", "ape"]
    names = [f"model.layers.0.mixer.{name}" for name in [*keeping, "bias", "A_log_proj", "Dt", "shape", "gate.weight"]]
    kept = [row.megatron for row in rows(matrices(*names, dtype=DType.float32)) if row.keeps_dtype]
    assert sorted(kept) == sorted(names[: len(keeping)])
    (counter,) = rows(matrices("model.steps", dtype=DType.int64))
    assert counter.keeps_dtype and not counter.gemm
    (codes,) = rows(matrices("model.layers.0.q_proj.weight", dtype=DType.float8_e4m3fn))
    assert codes.gemm and not codes.keeps_dtype and codes.stored == (64, 32)
    ordered = [f"model.layers.{layer}.fc{number}.weight" for layer in (0, 2, 10) for number in (1, 2, 11)]
    assert [row.megatron for row in rows(matrices(*reversed(ordered)))] == ordered


def test_a_name_may_have_a_number_of_more_digits_than_python_reads() -> None:
    names = [f"layers.{'1' * 5000}.fc.weight", f"layers.0.experts.{'1' * 5000}.w1.weight"]
    assert {row.megatron for row in rows(matrices(*names))} == {*names}


def test_matrices_that_are_stored_transposed_are_left_alone_wherever_the_class_is_used() -> None:
    square = matrices("h.0.attn.c_proj.weight", shape=(32, 32)) | matrices("h.0.mlp.c_proj.weight", shape=(128, 32))
    biases = {"h.0.attn.c_proj.bias": TensorSpec((32,), DType.bfloat16)}
    assert not why_not_gemms(square | biases).keys() & square.keys()
    usual = matrices("h.0.mlp.c_fc.weight", shape=(128, 32))
    biases |= {"h.0.mlp.c_proj.bias": TensorSpec((32,), DType.bfloat16)}
    biases |= {"h.0.mlp.c_fc.bias": TensorSpec((128,), DType.bfloat16)}
    reasons = why_not_gemms(square | usual | biases)
    assert {reasons.get(name) for name in square} == {"stored as [in, out]"} and not reasons.keys() & usual.keys()


def test_experts_have_one_state_for_each_linear_unless_a_number_is_missing() -> None:
    numbered = [f"layers.0.experts.{number}.w1.weight" for number in (*range(11), 12)]
    assert {row.of_experts for row in rows(matrices(*numbered))} == {False}
    assert {row.of_experts for row in rows(matrices(*numbered[:11]))} == {True}
    ordered = [row.megatron for row in rows(matrices(*numbered[:11]))]
    assert ordered == [f"layers.0.experts.w1.weight{number}" for number in range(11)]
    for taken in ("layers.0.experts.w1.weight", "layers.0.experts.w1.weight7"):  # a journal tells jobs apart by names
        stored = matrices(*numbered[:11], taken)
        assert {row.megatron for row in rows(stored)} == stored.keys()


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wrapper")
    any_models.save(path, "gemma3")
    return path


def test_patterns_take_in_and_leave_out_with_all_that_is_fused(tmp_path: Path, wrapper: Path) -> None:
    def codes(**patterns: tuple[str, ...]) -> set[str]:
        request = Request.export(wrapper, tmp_path / "out", "vllm", "dynamic", **patterns)
        return {name.removesuffix(".weight") for name in plan_command(request).plan.codes}

    plain, seen = codes(), codes(include=("vision_tower.*",))
    assert all("language_model" in name for name in plain) and plain < seen
    assert all(name.startswith("vision_tower.") for name in seen - plain)
    assert not any("embed" in name for name in seen)
    without = codes(exclude=("*.0.self_attn.q_proj", "*.1.mlp.*"))
    stem = "language_model.model.layers."
    attention = {f"{stem}0.self_attn.{part}_proj" for part in "qkv"}
    assert plain - without == attention | {f"{stem}1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert codes(include=("vision_tower.*",), exclude=("vision_tower.*",)) == plain
    kept = Precision(fp8=True, keep_bf16=("*.v_proj",))
    assert plain - codes(recipe=kept) == {f"{stem}{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"}  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="no weight of a linear is called 'q_proj'"):
        codes(exclude=("q_proj",))
    with pytest.raises(
        RecipeError, match="'.*embed_tokens' names `.*embed_tokens.*never becomes codes: it is an embedding"
    ):
        codes(include=("*.embed_tokens",))


def test_names_of_ignored_modules_are_those_in_files_and_in_memory(tmp_path: Path, wrapper: Path) -> None:
    ignored = export(wrapper, tmp_path / "out").plan.quantization["ignore"]
    seen = "vision_tower.encoder.layers.0.mlp.fc1", "language_model.model.embed_tokens"
    assert {*seen, f"model.{seen[0]}", "model.language_model.embed_tokens", "lm_head"} <= set(ignored)


def test_a_name_that_is_part_of_another_ignores_that_one_alone(tmp_path: Path) -> None:
    """ModelOpt's readers look for parts of names."""
    any_models.save(tmp_path / "source", "git")
    export(tmp_path / "source", tmp_path / "fp8", "mxfp8")
    assert check(open_checkpoint(tmp_path / "fp8"), engine_named("vllm")) == []
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "outpu[t]" in ignored and "output" not in ignored


def test_what_needs_a_table_is_refused_by_name_with_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "read_model", read_model)
    wrapper = tmp_path / "wrapper"
    any_models.save(wrapper, "blip-2")
    refused = [
        Request(wrapper, tmp_path / "out", "megatron"),
        Request.export(wrapper, tmp_path / "out", "vllm", "dynamic", kv_cache="fp8"),
        Request.export(wrapper, tmp_path / "out", "vllm", "dynamic", ranks=2),
        Request.export(
            wrapper, tmp_path / "out", "vllm", "dynamic", recipe=Precision(fp8=True, num_layers_at_end_in_bf16=1)
        ),
    ]
    for request in refused:
        with pytest.raises(UnknownArchitecture, match=r"`blip-2`.*text model is a opt, .*A table is one file"):
            plan_command(request)
    with pytest.raises(UnknownArchitecture, match="`blip-2`"):
        make_plan(open_checkpoint(wrapper), "megatron")
    with pytest.raises(PrecisionError, match="no weight is left"):
        plan_command(Request.export(wrapper, tmp_path / "out", "vllm", "dynamic", exclude=("language_model.*",)))


def test_inspect_says_of_each_matrix_what_becomes_of_it(wrapper: Path) -> None:
    reader = open_checkpoint(wrapper)
    found = {each["pattern"]: each["why_not_fp8"] for each in describe(reader)["linears"]}
    assert found["language_model.model.layers.*.self_attn.q_proj.weight"] is None
    assert found["vision_tower.encoder.layers.*.mlp.fc1.weight"] == "of a tower or projector"
    assert found["language_model.model.embed_tokens.weight"] == "an embedding"
    assert assess(reader, None, lambda total: nullcontext(lambda done: None)).measured == {"weight": 14}


def test_shapes_that_are_refused_are_counted_and_told_by_inspect_with_what_is_computed_with_them(
    tmp_path: Path,
) -> None:
    shapes = {
        **{
            f"m.layers.{layer}.attn.{part}_proj.weight": (24 if part == "k" else 64, 64)
            for layer in "01"
            for part in "qkvo"
        },
        "m.layers.0.mlp.in_proj.weight": (72, 64),
    }
    source = strange(tmp_path / "source", {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()})
    command = export(source, tmp_path / "out")
    values = {name for name, tensor in stored(tmp_path / "out").items() if tensor.dtype == torch.bfloat16}
    assert values == {name for name in shapes if "o_proj" not in name}
    assert any("for their shapes, or for those of what is computed with them: 7." in note for note in command.notes)
    found = {each["pattern"]: each["why_not_fp8"] for each in describe(open_checkpoint(source))["linears"]}
    assert found.pop("m.layers.*.attn.o_proj.weight") is None and found.pop("m.layers.*.a.weight") is None
    assert found == {
        "m.layers.*.attn.k_proj.weight": "shape [24, 64], of which FP8 GEMMs need multiples of 16",
        "m.layers.*.mlp.in_proj.weight": "shape [72, 64], of which FP8 GEMMs need multiples of 16",
        **{f"m.layers.*.attn.{part}_proj.weight": "computed with one of a shape that is refused" for part in "qv"},
    }


def test_codes_of_a_model_without_a_table_come_back_as_they_were(tmp_path: Path) -> None:
    any_models.save(tmp_path / "source", "glm4_moe")
    export(tmp_path / "source", tmp_path / "fp8", "block")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf", "bf16", workers=1)
    run(tmp_path / "bf16", tmp_path / "again", "hf", "fp8", workers=1)
    before, after = tree(tmp_path / "fp8"), tree(tmp_path / "again")
    assert before["model.safetensors"] == after["model.safetensors"]
    assert json.loads(before["config.json"]) == json.loads(after["config.json"])


def test_tensors_of_any_shape_and_dtype_travel(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(48, 32, generator=generator).bfloat16(),
        "model.layers.0.mlp.ragged.weight": torch.randn(17, 3, generator=generator).bfloat16(),
        "model.layers.0.A_log": torch.randn(8, generator=generator),
        "model.layers.{layer}.odd": torch.randn(2, 3, 4, 5, generator=generator).bfloat16(),
        "logit_scale": torch.randn((), generator=generator).bfloat16(),
        "nothing": torch.empty(0, 4).bfloat16(),
        "steps": torch.arange(7),
        "small": torch.arange(7, dtype=torch.int8).reshape(7, 1),
        "mask": torch.tensor([True, False]),
        "wide": torch.randn(3, generator=generator).double(),
    }
    save_file(tensors, _made(tmp_path / "source") / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(
        '{"model_type": "of_tomorrow", "limit": {"__float__": "Infinity"}}'
    )
    export(tmp_path / "source", tmp_path / "fp8")
    run(tmp_path / "fp8", tmp_path / "back", "hf", "bf16", workers=2, verify=True)
    back = stored(tmp_path / "back")
    assert same(tmp_path / "source", tmp_path / "fp8") and back.keys() == tensors.keys()
    for name in tensors.keys() - {"model.layers.0.mlp.up_proj.weight"}:
        assert back[name].dtype == tensors[name].dtype and torch.equal(back[name], tensors[name]), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["limit"] == {"__float__": "Infinity"}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_integers_beside_a_quantization_are_not_taken_for_values(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.zeros(16, 8, dtype=torch.uint8)}
    save_file(tensors, _made(tmp_path / "source") / "model.safetensors")
    config = {"model_type": "of_tomorrow", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match=r"up_proj.weight` is uint8: codes of a kind"):
        run(tmp_path / "source", tmp_path / "out", "hf", "bf16", workers=1)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        ("weight", "weight_scale"),
        ("weight", "weight.absmax"),
        ("weight", "SCB"),
        ("weight", "scales"),
        ("weight_packed", "weight_scale"),
        ("qweight", "scales"),
        ("embedding_quantized", "embedding_scale"),
        ("_weight_qdata", "_weight_scale"),
    ],
)
def test_integers_with_scales_and_no_word_of_how_they_are_coded_are_damage(
    tmp_path: Path, codes: str, scales: str
) -> None:
    """As after the loss of a `quantization_config`, under the names that tools give them."""
    module = "model.layers.0.mlp.up_proj"
    tensors = {f"{module}.{codes}": torch.ones(16, 8, dtype=torch.int8), f"{module}.{scales}": torch.ones(16, 1)}
    save_file(tensors, _made(tmp_path / "source") / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "of_tomorrow"}')
    with pytest.raises(DamagedCheckpoint, match=r"is int8 codes, .* but there is no `quantization_config`"):
        open_checkpoint(tmp_path / "source")


def test_integers_that_are_values_travel_beside_scales_of_something_else(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.attn.relative_position_index": torch.ones(4, 4, dtype=torch.int32),
        "model.layers.0.attn.logit_scale": torch.ones(4, 1),
        "model.hashes.weight": torch.ones(4, 4, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.weight_scale": torch.ones(16, 1),
        "model.layers.0.mlp.up_proj.mask": torch.ones(4, 4, dtype=torch.uint8),
        "model.layers.0.ids.weight": torch.ones(4, dtype=torch.int32),
        "model.layers.0.ids.scale": torch.ones(4),
    }
    save_file(tensors, _made(tmp_path / "source") / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "of_tomorrow"}')
    run(tmp_path / "source", tmp_path / "out", "hf", workers=1)
    back = stored(tmp_path / "out")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], each) for name, each in tensors.items())


def test_any_number_of_workers_writes_the_same_bytes_and_a_dry_run_none(tmp_path: Path) -> None:
    any_models.save(tmp_path / "source", "glm4_moe")
    request = Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic")
    planned = plan_command(request).plan.describe()
    assert planned["model"]["architecture"] == "glm4_moe" and not (tmp_path / "out").exists()
    trees = []
    for workers in (1, 2):
        carry_out(Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic"), workers=workers)
        trees.append(tree(tmp_path / "out"))
        (tmp_path / "out").rename(tmp_path / f"out {workers}")
    assert trees[0] == trees[1]


def test_a_plan_shows_names_that_differ_in_numbers_once_and_no_end_of_others(tmp_path: Path) -> None:
    names = [f"layers.{number}.norm.weight" for number in range(500)] + [
        f"{'n' * number}.weight" for number in range(1, 80)
    ]
    strange(tmp_path / "source", {name: torch.zeros(2) for name in names})
    plan = plan_command(Request(tmp_path / "source", tmp_path / "out", "hf")).plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_report, "_LINES", 50)
        shown = plan_report.tables(plan, Estimate(0, None))[0].rows
    assert len(shown) == 51 and ("layers.*.norm.weight", "500") in {tuple(row[:2]) for row in shown}
    assert shown[-1][0] == "... and 31 more"  # with the matrix of every strange model


def test_a_recipe_that_counts_no_layers_asks_for_no_number_of_them() -> None:
    assert not PRESETS["fp8-block"].counts_layers and Precision(fp8=True, num_layers_at_start_in_bf16=1).counts_layers


@pytest.mark.parametrize("model_type", ["phimoe", "nemotron_h"])
def test_modules_that_transformers_renames_in_memory_stay_in_bf16_there(tmp_path: Path, model_type: str) -> None:
    """A router that is a linear in memory, and linears of shapes that FP8 does not take."""
    model = any_models.save(tmp_path / "source", model_type)
    any_models.export(tmp_path / "source", tmp_path / "out", target="transformers")
    loaded = any_models.load_whole(type(model), tmp_path / "out")
    ours, theirs = (any_models.logits(each).flatten() for each in (loaded, model))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.98


def test_names_in_memory_are_looked_up_once_for_all_parts_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []
    through = names_in_memory._through
    monkeypatch.setattr(names_in_memory, "_through", lambda *args: lookups.append(args) or through(*args))
    modules = ["backbone.layers.0.mixer.in_proj", "language_model.model.layers.0.block_sparse_moe.gate"]

    def looked_up(parts: int) -> int:
        config = {f"part{number}_config": {"model_type": "mixtral"} for number in range(parts)}
        lookups.clear()
        names_in_memory.possible({"model_type": "mistral3", **config}, modules)
        return len(lookups)

    assert looked_up(1000) == looked_up(1) > 0


def test_a_config_of_more_kinds_of_models_than_any_has_is_damage() -> None:
    kinds = {f"{number}_config": {"model_type": kind} for number, kind in enumerate(MODEL_MAPPING_NAMES)}
    with pytest.raises(DamagedCheckpoint, match="kinds of models in one"):
        names_in_memory.possible({"model_type": "mistral3", **kinds}, ["model.layers.0.mlp.gate"])


def test_weights_become_fp8_without_state_that_nobody_can_record(tmp_path: Path) -> None:
    any_models.save(tmp_path / "source", "nemotron_h")
    carry_out(Request(tmp_path / "source", tmp_path / "out", "hf", "fp8"), workers=1)
    any_models.check_codes(tmp_path / "source", tmp_path / "out", "dynamic")


def test_no_command_is_advised_that_cannot_record_a_state_for_such_a_model(tmp_path: Path) -> None:
    any_models.save(tmp_path / "source", "nemotron_h")
    request = Request.export(tmp_path / "source", tmp_path / "out", "vllm")
    (note,) = [note for note in plan_command(request).notes if note.startswith("Scheme dynamic")]
    with pytest.raises(MissingFp8State, match="no FP8 state") as refused:
        plan_command(replace(request, scheme="static"))
    for words in (note, refused.value.do):
        assert not re.search("calibrate|resume", words)
    assert "--scheme dynamic" in refused.value.do


def test_experts_in_one_tensor_that_transformers_takes_apart_do_not_go_to_it_as_compressed_tensors(
    tmp_path: Path,
) -> None:
    model = any_models.save(tmp_path / "llama4", "llama4_text")
    with pytest.raises(PrecisionError, match="experts of a layer as one tensor, in BF16.*--scheme block"):
        export(tmp_path / "llama4", tmp_path / "out", target="transformers")
    export(tmp_path / "llama4", tmp_path / "block", "block", "transformers")
    any_models.load_whole(type(model), tmp_path / "block")
    export(tmp_path / "llama4", tmp_path / "for vllm")
    found = check(open_checkpoint(tmp_path / "for vllm"), engine_named("transformers"))
    assert any(finding.what == "experts of a layer as one tensor, in BF16" for finding in found)
    model = any_models.save(tmp_path / "granite", "granitemoe")  # of others it does not
    export(tmp_path / "granite", tmp_path / "whole", target="transformers")
    any_models.load_whole(type(model), tmp_path / "whole")


@pytest.mark.parametrize("kind", ["kimi_k25", "electra", *in_soak("kimi_linear", "whisper")])
def test_what_stays_values_is_listed_under_the_names_that_transformers_gives_it(tmp_path: Path, kind: str) -> None:
    """A linear within a layer, a tower whose q, k and v are one tensor, and heads that are tied and stored nowhere."""
    model = any_models.save(tmp_path / "source", kind)
    export(tmp_path / "source", tmp_path / "fp8", target="transformers")
    assert not [
        found for found in check(open_checkpoint(tmp_path / "fp8"), engine_named("transformers")) if found.rule.fatal
    ]
    coded = any_models.load_whole(type(model), tmp_path / "fp8")
    run(tmp_path / "fp8", tmp_path / "back", "hf", "bf16", workers=1)
    decoded = any_models.load_whole(type(model), tmp_path / "back").state_dict()
    for name, tensor in coded.state_dict().items():
        if tensor.dtype == torch.bfloat16 and "scale" not in name:
            assert torch.equal(tensor, decoded[name]), name


@pytest.mark.parametrize(
    ("kind", "up"),
    [
        ("llama4_text", "model.layers.1.feed_forward.experts.0.up_proj"),
        ("granitemoeshared", "model.layers.1.block_sparse_moe.experts.0.up_proj"),
    ],
)
def test_experts_in_one_tensor_are_listed_by_the_linears_for_which_vllm_looks(
    tmp_path: Path, kind: str, up: str
) -> None:
    """vLLM 0.33 takes experts for FP8 under compressed-tensors unless each linear of the first is ignored."""
    any_models.save(tmp_path / "source", kind)
    export(tmp_path / "source", tmp_path / "fp8")
    reader, vllm = open_checkpoint(tmp_path / "fp8"), engine_named("vllm")
    assert check(reader, vllm) == []
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    listed = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [entry for entry in listed if not BY_NAME_OR_REGEX.of([entry])(up)]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    (found,) = check(open_checkpoint(tmp_path / "fp8"), vllm)
    assert f"`{up}` is not ignored" in found.what and found.rule.fatal


def test_verify_finds_modules_that_transformers_calls_otherwise_than_a_list_does(tmp_path: Path) -> None:
    any_models.save(tmp_path / "source", "kimi_linear")
    export(tmp_path / "source", tmp_path / "fp8")
    found = check(open_checkpoint(tmp_path / "fp8"), engine_named("transformers"))
    wanted = "model.layers.0.self_attn.f_a_proj.weight", "in memory `model.layers.0.self_attn.forget_gate.f_a_proj`"
    assert any(finding.where == wanted[0] and wanted[1] in finding.what and finding.rule.fatal for finding in found)


def strange(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A directory of an unknown kind: one linear, and these."""
    path.mkdir()
    linear = {"m.layers.0.a.weight": torch.ones(64, 64, dtype=torch.bfloat16)}
    save_file(linear | tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    return path


def test_a_scale_whose_name_is_taken_is_refused_and_its_module_can_be_excluded(tmp_path: Path) -> None:
    own = {"m.layers.0.a.weight_scale": torch.ones(64, 1), "m.layers.0.b.weight": torch.ones(64, 64)}
    source = strange(tmp_path / "source", own)
    with pytest.raises(PrecisionError, match=r"(?s)`m.layers.0.a.weight_scale`.*--exclude"):
        export(source, tmp_path / "out")
    export(source, tmp_path / "without", exclude=("m.layers.0.a",))
    made = stored(tmp_path / "without")
    assert torch.equal(made["m.layers.0.a.weight_scale"].float(), own["m.layers.0.a.weight_scale"])
    assert "m.layers.0.b.weight_scale" in made


@pytest.mark.parametrize("shape", [(64, 0), (0, 64), (0, 0)])
def test_a_matrix_without_elements_travels_as_it_is(tmp_path: Path, shape: tuple[int, int]) -> None:
    empty = {"m.layers.0.b.weight": torch.ones(shape, dtype=torch.bfloat16)}
    source = strange(tmp_path / "source", empty)
    run(source, tmp_path / "hf", "hf", "bf16", workers=1)
    export(source, tmp_path / "fp8")
    for made in (stored(tmp_path / "hf"), stored(tmp_path / "fp8")):
        assert made["m.layers.0.b.weight"].shape == shape
        assert made["m.layers.0.b.weight"].dtype == torch.bfloat16
    readiness = assess(open_checkpoint(source), None, lambda total: nullcontext(lambda done: None))
    assert readiness.measured == {"weight": 1}
    assert not any("calibrate" in line for line in advice(readiness, "source"))


def test_a_name_of_five_thousand_digits_is_refused_in_a_bin_file_too(tmp_path: Path) -> None:
    torch.save({f"m.layers.{'9' * 5000}.a.weight": torch.ones(64, 64)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    with pytest.raises(DamagedCheckpoint, match="a name of 5018 letters"):
        open_checkpoint(tmp_path).specs  # noqa: B018


MOST_EXACT = ("norm", "lm_head", "bias", "inv_freq")
"""Parts of names of tensors that are FP32 here, beside linears in BF16."""


@pytest.mark.parametrize(("kind", "tabled"), [("llama-3", True), ("llama-3", False), ("bamba", False)])
def test_what_is_fp32_beside_linears_in_bf16_stays_so_in_an_export_and_back(
    tmp_path: Path, kind: str, tabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tabled:
        monkeypatch.setattr(huggingface, "read_model", untabled)
    save = pico.save if kind in pico.FAMILIES else any_models.save
    save(tmp_path / "source", kind, dtype=torch.bfloat16)
    before = stored(tmp_path / "source")
    wide = {
        name: tensor.float() + 2**-12 * torch.rand(tensor.shape)
        for name, tensor in before.items()
        if any(part in name for part in MOST_EXACT)
    }
    save_file(before | wide, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    command = export(tmp_path / "source", tmp_path / "fp8", "dynamic")
    assert not any("FP32" in note for note in command.notes)
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["dtype"] == "bfloat16"
    run(tmp_path / "fp8", tmp_path / "values", "hf", "keep", workers=1)
    run(tmp_path / "values", tmp_path / "again", "hf", "fp8", workers=1)
    for made in ("fp8", "values", "again"):
        found = stored(tmp_path / made)
        for name, tensor in wide.items():
            assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), (made, name)
        assert same(tmp_path / "source" if made == "fp8" else tmp_path / "fp8", tmp_path / made)


def test_what_stays_values_of_a_source_in_fp32_is_rounded_and_counted_and_verify_says_so(tmp_path: Path) -> None:
    pico.save(tmp_path / "source", "llama-3", dtype=torch.float32)
    command = export(tmp_path / "source", tmp_path / "fp8", "dynamic")
    found = {name for name, tensor in stored(tmp_path / "fp8").items() if tensor.dtype == torch.bfloat16}
    assert any(note.startswith(f"{len(found)} tensors that stay values are FP32 or FP16") for note in command.notes)
    comparison = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "fp8"))
    assert comparison.equal
    assert {tensor.name for tensor in comparison.tensors if tensor.status == "rounded"} == found
    assert verdict(comparison).endswith(f", {len(found)} rounded.")


@pytest.mark.parametrize(("target", "scheme"), [("vllm", "dynamic"), ("transformers", "w4a16"), ("sglang", "block")])
def test_what_stays_values_of_a_source_in_fp16_stays_fp16_and_codes_come_back(
    tmp_path: Path, target: str, scheme: str
) -> None:
    pico.save(tmp_path / "source", "llama-3", dtype=torch.float16, hidden_size=256, intermediate_size=256)
    command = export(tmp_path / "source", tmp_path / "out", scheme, target)
    before, codes = stored(tmp_path / "source"), stored(tmp_path / "out")
    values = before.keys() - {name.removesuffix("_packed") for name in codes if codes[name].dtype != torch.float16}
    assert values and all(torch.equal(codes[name], before[name]) for name in values)
    assert any("2 matrices that stay values are FP16" in note for note in command.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert check(open_checkpoint(tmp_path / "out"), engine_named(target)) == []
    run(tmp_path / "out", tmp_path / "back", "hf", workers=1)
    run(tmp_path / "back", tmp_path / "again", "hf", "fp8", workers=1, verify=True)
    assert same(tmp_path / "out", tmp_path / "again")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("container", ["safetensors", "bin", "dcp"])
def test_tensors_without_elements_are_written_as_any_other(tmp_path: Path, container: str) -> None:
    tensors = {"a.weight": torch.ones(4, 4), "a.rows": torch.empty(0, 4), "a.columns": torch.empty(4, 0)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    run(tmp_path / "source", tmp_path / "out", "hf", container=container, verify=True)
    if container == "dcp":
        found = {f"model.{name}": torch.full((4, 4), 7.0).narrow(0, 0, one.shape[0]) for name, one in tensors.items()}
        found["model.a.columns"] = torch.empty(4, 0)
        dcp.load(found, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
        assert all(torch.equal(found[f"model.{name}"], one) for name, one in tensors.items())
    run(tmp_path / "out", tmp_path / "back", "hf", verify=True)
    assert same(tmp_path / "source", tmp_path / "back")
