"""`export-inference --target mlx`: MLX's names and codes, as mlx-lm saves them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import conversions
import mlx_directories
import mxfp4_directories
import pico
import prediction_layer
import pytest
import repository
import soaking
import tiny_wrappers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from target_checks import check_directory
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config, read_model, to_hf_config
from precisionctl.checkpoints.mlx.mlx_config import as_mlx_reads, each_without, words_of_mlx
from precisionctl.checkpoints.mlx.mlx_models import check_loaded, computed_otherwise
from precisionctl.checkpoints.mlx.mlx_names import WRAPPED
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.mlx_groups import mlx_groups
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, MLX, OTHER_TARGETS, TE, Request
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionctlError, PrecisionError, RecipeError, UnknownArchitecture, UnknownFormat
from precisionctl.reports.verify import verdict
from precisionctl.verify.compare import compare

GOLDEN = repository.GOLDEN / "mlx_codes.safetensors"
WIDE = {"hidden_size": 128, "intermediate_size": 128}


def export(source: Path, out: Path, scheme: str | None = None, workers: int = 1, **options: Any) -> dict[str, Any]:
    """The tensors of the result, by MLX's names."""
    conversions.carry_out(Request.export(source, out, MLX, scheme, **options), workers=workers)
    return {name: each for file in sorted(out.glob("*.safetensors")) for name, each in load_file(file).items()}


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


QUANTIZED = sorted(
    name.removesuffix(".decoded")
    for name in load_file(GOLDEN)
    if name.endswith(".decoded") and name.startswith(("affine-", "mxfp", "nvfp4"))
)


@pytest.mark.parametrize("case", QUANTIZED)
def test_codes_scales_and_biases_are_the_bytes_of_mlx(case: str) -> None:
    stored = load_file(GOLDEN)
    mode, *sizes = case.split("-")
    bits, group, dtype = sizes or ("8" if mode == "mxfp8" else "4", "16" if mode == "nvfp4" else "32", "bfloat16")
    groups = mlx_groups(mode, int(bits), int(group), DType(dtype))
    values = stored["values"].to(DType(dtype).torch)
    kinds = ("weight", "scales", "biases") if mode == "affine" else ("weight", "scales")
    expected = [stored[f"{case}.{kind}"].reshape(len(values), -1).view(torch.uint8) for kind in kinds]
    assert torch.equal(groups.encode(values), torch.cat(expected, 1))
    assert torch.equal(groups.rounded(values), stored[f"{case}.decoded"].bfloat16().float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("below", [True, False])
def test_numbers_that_are_steps_from_the_end_farther_from_zero_have_the_codes_that_they_are_steps(
    bits: int, below: bool
) -> None:
    """In integers: with the end at -m steps, and 2^bits - 1 steps in all, each code is the number of steps from it."""
    most, generator = (1 << bits) - 1, torch.Generator().manual_seed(0)
    codes = torch.randint(0, most + 1, (6, 64), generator=generator)
    codes[:, 0], codes[:, 1] = 0, most
    end = -(most // 2 + 1 + torch.arange(6))[:, None]
    step = 2.0 ** -torch.arange(6)[:, None] * (1 if below else -1)
    made = mlx_groups("affine", bits, 64, DType.bfloat16).encode((end + codes) * step)
    words, scales, biases = torch.split(made, [64 * bits // 8, 2, 2], 1)
    found = words.long() if bits == 8 else torch.stack([words & 15, words >> 4], 2).view(6, 64).long()
    assert torch.equal(found, codes)
    assert torch.equal(scales.contiguous().view(torch.bfloat16).float(), step.float())
    assert torch.equal(biases.contiguous().view(torch.bfloat16).float(), (end * step).bfloat16().float())


FAMILIES = ("qwen3-moe", "mamba2", "nemotron-h", "deepseek-v3", "gpt-oss", "granite-moe", "qwen3-next", "exaone-moe")
RENAMED = ("llama-tied", "granite-hybrid-dense", "granite-hybrid", "laguna", "lfm2-moe", "mixtral", "jamba", "ling-2")
MORE = ("gemma4-moe", "mistral4", "kimi-linear", "gpt-neox", "gpt-j", "step3p5")
OF_THEIR_CLASS = {**dict.fromkeys(("gpt-neox", "gpt-j"), {"intermediate_size": 256}), "ling-2": {"head_dim": 16}}


@pytest.mark.parametrize("family", soaking.few([*FAMILIES, *RENAMED, *MORE], "granite-moe", "gpt-oss"))
def test_values_have_the_names_and_shapes_of_mlx_lm_and_come_back(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **OF_THEIR_CLASS.get(family, {}))
    if family == "ling-2":  # mlx-lm knows it by the name that is published, and transformers has another
        (tmp_path / "hf" / "config.json").write_text(
            json.dumps(config_of(tmp_path / "hf") | {"model_type": "bailing_moe"})
        )
    expected, config = load_file(tmp_path / "hf" / "model.safetensors"), config_of(tmp_path / "hf")
    prediction = [name for name in expected if name.startswith("mtp.")]
    expected = {name: each for name, each in expected.items() if name not in prediction}
    if family == "granite-hybrid":  # of a model with experts mlx-lm leaves the others' MLPs as they are
        shared = {name: expected.pop(name) for name in list(expected) if ".shared_mlp." in name}
    mlx_directories.rename(expected, config)
    expected |= shared if family == "granite-hybrid" else {}
    found = export(tmp_path / "hf", tmp_path / "mlx")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    with safe_open(tmp_path / "mlx" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "mlx"}
    assert config_of(tmp_path / "mlx").keys().isdisjoint({"quantization", "quantization_config"})
    assert all(each.equal for each in compare(*map(open_checkpoint, (tmp_path / "hf", tmp_path / "mlx"))).tensors)


@pytest.mark.parametrize(
    ("scheme", "setting"), [("4bit", (64, 4, "affine")), *soaking.in_soak(("nvfp4", (16, 4, "nvfp4")))]
)
def test_a_directory_of_codes_says_what_they_are_and_verify_knows_them(
    tmp_path: Path, scheme: str, setting: tuple[int, int, str]
) -> None:
    """The router is of eight bits, and of the latent's keys and values each head has its own codes."""
    for family, sizes in (("qwen3-moe", {"moe_intermediate_size": 64}), ("deepseek-v3", {"kv_lora_rank": 64})):
        pico.save(tmp_path / family, family, dtype=torch.bfloat16, **WIDE, **sizes)
        found = export(tmp_path / family, tmp_path / f"{family}-mlx", scheme)
        config = config_of(tmp_path / f"{family}-mlx")
        routers = [name.removesuffix(".scales") for name in found if name.endswith("mlp.gate.scales")]
        assert bool(routers) == (family == "qwen3-moe")
        said = dict(zip(("group_size", "bits", "mode"), setting, strict=True))
        assert config["quantization"] == said | dict.fromkeys(routers, {"group_size": 64, "bits": 8})
        assert config["quantization_config"] == config["quantization"]
        index = json.loads((tmp_path / f"{family}-mlx" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
        statuses = compare(*map(open_checkpoint, (tmp_path / family, tmp_path / f"{family}-mlx"))).tensors
        coded = {each.name for each in statuses if each.status == "encoded"}
        assert all(each.equal for each in statuses) and {name for name in coded if "kv_b_proj" in name} == {
            name for name in (each.name for each in statuses) if "kv_b_proj" in name
        }
        assert "lm_head.weight" in coded and "model.embed_tokens.weight" in coded


def test_gpt_oss_keeps_the_codes_that_it_is_published_in(tmp_path: Path) -> None:
    stored = mxfp4_directories.make(tmp_path / "hf")
    found = export(tmp_path / "hf", tmp_path / "mlx", "8bit")
    blocks = stored["model.layers.0.mlp.experts.gate_up_proj_blocks"].flatten(2)
    scales = stored["model.layers.0.mlp.experts.gate_up_proj_scales"]
    for first, name in enumerate(("gate_proj", "up_proj")):
        module = f"model.layers.0.mlp.experts.{name}"
        assert torch.equal(found[f"{module}.weight"].view(torch.uint8), blocks[:, first::2])
        assert torch.equal(found[f"{module}.scales"], scales[:, first::2])
    said = config_of(tmp_path / "mlx")["quantization"]
    assert {key: said[key] for key in ("group_size", "bits", "mode")} == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert said["lm_head"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    notes = plan_command(Request.export(tmp_path / "hf", tmp_path / "values", MLX)).notes
    assert any("--scheme mxfp4 keeps them" in note for note in notes)


@pytest.mark.soak
def test_codes_of_fp8_weights_are_known_to_be_those_of_their_values(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16, **WIDE)
    conversions.carry_out(Request.export(tmp_path / "hf", tmp_path / "fp8", "vllm", "dynamic"), workers=1)
    export(tmp_path / "fp8", tmp_path / "mlx", "4bit")
    found = compare(*map(open_checkpoint, (tmp_path / "fp8", tmp_path / "mlx"))).tensors
    assert all(each.equal for each in found) and "encoded" in {each.status for each in found}


@pytest.mark.soak
def test_bytes_do_not_depend_on_workers_or_on_the_container(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16, **WIDE)
    conversions.run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    names = ("a", "b", "c")
    for name, source, workers in zip(names, ("hf", "hf", "megatron"), (1, 3, 2), strict=True):
        export(tmp_path / source, tmp_path / name / "out", "4bit", workers, max_shard_size=100_000)
    made = [conversions.tree(tmp_path / name / "out") for name in names]
    assert len([file for file in made[0] if file.endswith(".safetensors")]) > 1
    first, *others = ({file: tree[file] for file in tree if file.startswith(("model", "config"))} for tree in made)
    assert all(first == other for other in others)


def test_a_config_has_the_words_that_mlx_lm_reads(tmp_path: Path) -> None:
    """transformers 5 keeps the base of rotary embeddings elsewhere, without which mlx-lm takes 10000."""
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    assert "rope_theta" not in config_of(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "mlx")
    config = config_of(tmp_path / "mlx")
    assert (config["rope_theta"], config["rope_scaling"]["type"]) == (500000.0, "llama3")
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "bfloat16"


FRACTION, IN_ONE_OBJECT = "partial_rotary_factor", "rope_parameters"


@pytest.mark.parametrize("family", ["glm4", "glm4-moe", "phi", "qwen3-next", "stablelm", "qwen3-5", "ministral3"])
def test_a_config_that_is_made_says_how_heads_turn_as_the_source_s_would(family: str) -> None:
    """Of GGUF, of Megatron without a config.json: mlx-lm's class has other defaults than transformers', or none."""
    source = pico.config(family)
    model, rope = from_hf_config(source), source["rope_parameters"]
    made = to_hf_config(model, "bfloat16")
    config = as_mlx_reads(made, made, words_of_mlx(model, DType.bfloat16))
    said = config.get("text_config", config)
    turning = said[IN_ONE_OBJECT] if family in ("qwen3-5", "ministral3") else said
    assert turning["rope_theta"] == rope["rope_theta"]
    assert turning.get(FRACTION, rope.get(FRACTION)) == rope.get(FRACTION)
    assert (FRACTION in turning) == (FRACTION in rope) or family == "qwen3-5"  # whose default is the same


def test_a_wrapper_s_config_may_have_the_text_model_s_keys_at_its_top() -> None:
    """As Qwen2-VL was published."""
    config = pico.config("qwen2") | {"model_type": "qwen2_vl", "vision_config": {}}
    model = from_hf_config(config)
    made = as_mlx_reads(config, to_hf_config(model, "bfloat16"), words_of_mlx(model, DType.bfloat16))
    assert made["model_type"] == "qwen2_vl" and made["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert made.keys().isdisjoint({"vision_config", "text_config"})


def test_no_rotary_embeddings_are_said_in_mlx_lm_s_word_for_none() -> None:
    source = pico.config("granite-hybrid")
    assert source["position_embedding_type"] is None
    assert words_of_mlx(from_hf_config(source), DType.bfloat16)["position_embedding_type"] == "nope"


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
NARROW = {"hidden_size": 32, "intermediate_size": 48}


def test_a_directory_is_held_against_what_mlx_lm_asks_of_one(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "mlx")
    found = check_directory(tmp_path / "mlx", MLX)
    assert [finding.where for finding in found.findings] == ["tokenizer"] and not found.passes
    with pytest.raises(UnknownFormat, match="no directory of mlx-lm.*--target mlx"):
        check_directory(tmp_path / "hf", MLX)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[PrecisionctlError], str]] = {
    "a family that is not known": ("falcon-h1", {}, {}, UnknownArchitecture, "stores of a 'falcon_h1' is not known"),
    "a head where mlx-lm has none": (
        "gemma",
        {"tie_word_embeddings": False},
        {},
        UnknownArchitecture,
        "a head of its own",
    ),
    "no head where it has one": (
        "phi",
        {"tie_word_embeddings": True},
        {},
        UnknownArchitecture,
        "embedding as the head",
    ),
    "dense layers": ("qwen2-moe", {}, {}, UnknownArchitecture, "with layers without experts"),
    "gates of channels": ("laguna-per-element", {}, {}, UnknownArchitecture, "gates of single channels"),
    "heads that do not make the width": (
        "nemotron-nas",
        {"head_dim": 32},
        {},
        UnknownArchitecture,
        "with heads of this size",
    ),
    "another target's scheme": ("llama-3", {}, {"scheme": "w4a16"}, RecipeError, "mlx-lm does not read w4a16"),
    "several GPUs": ("llama-3", {}, {"ranks": 2}, RecipeError, "--tp.* cannot be given for mlx-lm"),
    "modules that are chosen": (
        "llama-3",
        {},
        {"include": ("*",)},
        RecipeError,
        "--include.* cannot be given for mlx-lm",
    ),
    "no whole groups": (
        "llama-3",
        {"hidden_size": 32, "intermediate_size": 48},
        {"scheme": "4bit"},
        PrecisionError,
        "4bit",
    ),
}


YARN, WITHOUT_WINDOWS = pico.YARN_ROPE, ["full_attention"] * pico.settings("gpt-oss")["num_hidden_layers"]
CHUNKS = [*["chunked_attention"] * 3, "full_attention"]
NOT_IN_ITS_CLASS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-moe", {"rope_parameters": YARN}, "rotary embeddings scaled as 'yarn'"),
    ("deepseek", {}, "experts' weights that are multiplied"),
    ("deepseek", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "groups of experts"),
    ("deepseek-v2", {"rope_parameters": {**YARN, "rope_type": "linear"}}, "rotary embeddings scaled as 'linear'"),
    ("hunyuan", {"rope_parameters": {**YARN, "rope_type": "linear"}}, "scaled without an alpha"),
    ("llama-3", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "an attention_factor of YaRN"),
    ("minicpm3", {"tie_word_embeddings": True}, "its embedding as a head whose logits are divided"),
    ("qwen3", {"attention_bias": True}, "biases of attention"),
    ("phimoe", {"attention_bias": False}, "no biases"),
    ("mixtral", {"head_dim": 24}, "heads of this size"),
    ("gemma2", {"final_logit_softcapping": None}, "scores or logits without a cap"),
    ("gemma3", {"final_logit_softcapping": 3.0}, "a cap of logits"),
    ("deepseek-v3", {"num_experts_per_tok": 1}, "one expert for each token"),
    ("qwen2-moe", {"norm_topk_prob": True, "mlp_only_layers": []}, "experts' weights that are normalised"),
    (
        "gpt-oss",
        {"layer_types": WITHOUT_WINDOWS},
        "windows in no layer",
    ),
    ("gpt-neox", {"attention_bias": False}, "no biases"),
    ("gpt-neox", {"intermediate_size": 128}, "an MLP of this width"),
    ("qwen3-5", {"layer_types": ["full_attention", *["linear_attention"] * 3]}, "delta nets in these layers"),
    ("ministral3", {"rope_parameters": YARN}, "queries that are not scaled"),
    ("llama4", {"moe_layers": [0, 3]}, "experts in these layers"),
    ("llama4", {"num_experts_per_tok": 2}, "several experts for each token"),
    ("llama4", {"no_rope_layers": [1, 0, 1, 0], "layer_types": CHUNKS}, "rotary embeddings in these layers"),
    ("llama4", {"layer_types": ["chunked_attention"] * 4}, "chunks of attention in these layers"),
]
"""Settings with which mlx-lm 0.32.2 loads nothing, or computes something else from the first tokens on."""


@pytest.mark.parametrize(("family", "changes", "named"), NOT_IN_ITS_CLASS, ids=str)
def test_a_setting_that_the_class_of_mlx_lm_does_not_have_is_refused(
    family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnknownArchitecture, match=re.escape(named)):
        check_loaded(from_hf_config(pico.config(family, **changes)))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("olmo3", "windows turn by the base of the others"),
        *(("gpt-oss", "clamped at 7"), ("mistral", "attention has no window"), ("llama-3", "")),
    ],
)
def test_what_mlx_lm_computes_otherwise_is_said(family: str, said: str) -> None:
    assert bool(said) == any(said in each for each in computed_otherwise(pico.shape(family)))


@pytest.mark.parametrize(
    ("windows", "each"), [("WFWFW", 2), ("WWWFW", 4), ("WW", 3), ("FW", None), ("FF", None), ("WFF", None)]
)
def test_a_pattern_of_windows_is_the_number_that_mlx_lm_reads_or_none(windows: str, each: int | None) -> None:
    assert each_without([layer == "W" for layer in windows]) == each


@pytest.mark.parametrize("dense", [0, 1, 3])
def test_layers_before_those_with_experts_are_counted_also_where_no_layer_has_them(dense: int) -> None:
    model = from_hf_config(pico.config("deepseek-v3", first_k_dense_replace=dense))
    assert words_of_mlx(model, DType.bfloat16)["first_k_dense_replace"] == dense


@pytest.mark.parametrize("case", soaking.few(REFUSED, "dense layers", "another target's scheme", "no whole groups"))
def test_what_mlx_lm_does_not_load_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    family, changes, options, error, message = REFUSED[case]
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **changes)
    with pytest.raises(error, match=message):
        export(tmp_path / "hf", tmp_path / "out", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.5}, {"hidden_act": "gelu"}])
def test_a_known_family_without_a_table_is_refused_for_the_setting(changes: dict[str, Any]) -> None:
    ((key, value),) = changes.items()
    with pytest.raises(UnknownArchitecture, match=f"no llama known here has {key}={value!r}"):
        check_loaded(read_model(pico.config("llama-3", **changes)))


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("target", [MLX, LLAMA_CPP, TE])
def test_a_choice_of_codes_is_for_engines(target: str, option: str) -> None:
    with pytest.raises(RecipeError, match=f"--{option}.* cannot be given for {OTHER_TARGETS[target]}"):
        Request.export("in", "out", target, **{option: ("*",)})


def test_a_target_in_capitals_is_the_error_whatever_the_scheme() -> None:
    with pytest.raises(RecipeError, match="no engine `MLX`.* mlx"):
        Request.export("in", "out", "MLX", "4bit")


@pytest.mark.parametrize(("scheme", "dtype"), [("4bit", "BF16"), *soaking.in_soak(("bf16", "BF16"), ("f16", "FP16"))])
def test_weights_that_are_codes_and_rounded_ones_that_are_not_are_counted(
    tmp_path: Path, scheme: str, dtype: str
) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.float32, **WIDE)
    command = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", MLX, scheme))
    stored = load_file(tmp_path / "hf" / "model.safetensors").values()
    coded = sum(each.dim() == 2 for each in stored) if scheme == "4bit" else 0
    assert command.plan.coded_weight_count == coded
    (note,) = (note for note in command.notes if f"{dtype} in the result" in note)
    assert note.startswith(f"{len(stored) - coded} tensors that stay values are FP32")


def test_norms_plus_one_are_rounded_and_no_codes(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-next", dtype=torch.bfloat16)
    file, norm = tmp_path / "hf" / "model.safetensors", "model.norm.weight"
    tensors = load_file(file)
    tensors[norm][0] = 0.001  # 1.001 is no BF16
    save_file(tensors, file, {"format": "pt"})
    export(tmp_path / "hf", tmp_path / "mlx")
    found = compare(*map(open_checkpoint, (tmp_path / "hf", tmp_path / "mlx")))
    assert {each.name: each.status for each in found.tensors}[norm] == "rounded"
    assert found.equal and "codes" not in verdict(found)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (torch.nan, "holds a NaN.* broken"),
        (1e38, "beyond 8.47e\\+37, the largest.* BF16 has a number"),
        (torch.inf, "holds inf, .* broken there, in BF16 too"),
    ],
)
def test_numbers_of_which_mlx_makes_no_codes_are_refused(tmp_path: Path, number: float, message: str) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = number
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(PrecisionError, match=message):
        export(tmp_path / "hf", tmp_path / "out", "4bit")
    assert not (tmp_path / "out").exists()


def text_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a wrapper's text model, by its own names."""
    names = {name: re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name) for name in tensors}
    names |= {name: "lm_head.weight" for name in tensors if name.endswith("lm_head.weight")}
    towers = tiny_wrappers.towers(tensors)
    return {names[name]: tensor for name, tensor in tensors.items() if name not in towers}


FOUR_LAYERS = {"num_hidden_layers": 4}
WRAPPERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), FOUR_LAYERS),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "gemma4_unified"), {}),
    "gemma3n": {"num_kv_shared_layers": 0},
    **dict.fromkeys(("mistral3", "llava", "llama4", "kimi_k25", "muse_glimmer", "minimax_m3_vl"), {}),
}


def test_the_page_names_the_wrappers_that_are_written() -> None:
    page = (repository.DOCS / "mlx.md").read_text()
    said = page.partition("Of wrappers, these:")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", said.partition(". ")[0]) == sorted(WRAPPED)
    assert WRAPPERS.keys() == WRAPPED.keys()


@pytest.mark.parametrize("kind", soaking.few(WRAPPERS, "qwen3_5", "qwen3_vl_moe"))
def test_the_text_model_of_a_wrapper_is_written_as_mlx_lm_has_it_and_is_read_alone(tmp_path: Path, kind: str) -> None:
    tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16, **WRAPPERS[kind])
    expected, said = text_alone(tiny_wrappers.stored(tmp_path / "hf")), config_of(tmp_path / "hf")["text_config"]
    mlx_directories.rename(expected, said)
    notes = plan_command(Request.export(tmp_path / "hf", tmp_path / "mlx", MLX)).notes
    assert any(re.search(r"Its towers, \d+ tensors, are not written", note) for note in notes)
    found = export(tmp_path / "hf", tmp_path / "mlx")
    before = "" if kind in ("gemma3n", "muse_glimmer") else "language_model."
    assert found.keys() == {f"{before}{name}" for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(found[f"{before}{name}"], tensor.bfloat16()), name
    config = config_of(tmp_path / "mlx")
    assert config["model_type"] == kind and "vision_config" not in config
    readers = [open_checkpoint(tmp_path / name) for name in ("hf", "mlx")]
    assert compare(*readers).equal
    conversions.run(tmp_path / "mlx", tmp_path / "back", "hf")
    assert from_hf_config(config_of(tmp_path / "back")) == replace(readers[0].model, wrapper=None, mtp_num_layers=0)


OTHER_WORDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"full_attention_interval": 3, "tie_word_embeddings": True},
    "gemma3": {"sliding_window_pattern": 5},
    "nemotron-h": {"mamba_proj_bias": True},
}


@pytest.mark.parametrize(
    "family", soaking.few([*FAMILIES, *RENAMED[:-1], *WRAPPERS], "nemotron-h", "qwen3_5", "gemma3")
)
def test_what_is_written_keeps_the_rules_and_words_of_another_model_do_not(tmp_path: Path, family: str) -> None:
    """Words that mlx-lm goes by, and transformers not."""
    if family in WRAPPERS:
        tiny_wrappers.save(tmp_path / "hf", family, dtype=torch.bfloat16, **WRAPPERS[family])
    else:
        pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "mlx")
    assert {finding.where for finding in check_directory(tmp_path / "mlx", MLX).findings} <= {"tokenizer"}
    config = config_of(tmp_path / "mlx")
    text = config.get("text_config", config)
    for key, value in OTHER_WORDS.get(family, {}).items():
        text[key] = value
        (tmp_path / "mlx" / "config.json").write_text(json.dumps(config))
        assert f"config.json, {key}" in [each.where for each in check_directory(tmp_path / "mlx", MLX).findings]


@pytest.mark.parametrize("kind", ["gemma3", *soaking.in_soak("llama4", "gemma4", "minimax_m3_vl")])
def test_what_mlx_lm_has_of_a_wrapper_keeps_its_settings_in_megatron(tmp_path: Path, kind: str) -> None:
    """Those that Megatron's arguments do not say."""
    tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16, **WRAPPERS[kind])
    export(tmp_path / "hf", tmp_path / "mlx")
    conversions.run(tmp_path / "mlx", tmp_path / "megatron", "megatron")
    readers = [open_checkpoint(tmp_path / name) for name in ("mlx", "megatron")]
    assert readers[0].model == replace(readers[1].model, padded_vocab_size=readers[0].model.padded_vocab_size)
    assert compare(*readers).equal


ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "null beside a scaling": ("llama-3", {"rope_scaling": None}),
    "a stale base": ("qwen3", {"rope_theta": 123.0}),
    "a base in no object": ("qwen3-5", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 777.0}),
}
"""Families, and keys that are put into config.json."""


@pytest.mark.parametrize("case", ROTARY)
def test_mlx_lm_is_told_of_the_rotary_embeddings_that_transformers_computes(tmp_path: Path, case: str) -> None:
    """transformers passes over older keys beside `rope_parameters`, and mlx-lm does not."""
    family, more = ROTARY[case]
    pico.save(tmp_path / "hf", family)
    config = config_of(tmp_path / "hf") | more
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "mlx")
    made = config_of(tmp_path / "mlx")
    made = made.get("text_config", made)
    base = made["rope_parameters"]["rope_theta"] if family == "qwen3-5" else made["rope_theta"]
    assert base == theirs.rope_parameters["rope_theta"]
    scaled = theirs.rope_parameters["rope_type"] != "default"
    assert bool(made.get("rope_scaling")) is scaled
    assert not scaled or made["rope_scaling"]["factor"] == theirs.rope_parameters["factor"]


def test_mlx_lm_normalises_experts_weights_where_transformers_does_whatever_is_said(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "qwen3_vl_moe", dtype=torch.bfloat16)
    config = config_of(tmp_path / "hf")
    config["text_config"]["norm_topk_prob"] = False  # of which the class has no notice
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    export(tmp_path / "hf", tmp_path / "mlx")
    assert config_of(tmp_path / "mlx")["text_config"]["norm_topk_prob"] is True


def test_a_text_model_that_mlx_lm_has_in_a_wrapper_alone_gets_a_wrapper_s_config(tmp_path: Path) -> None:
    """Its layer of prediction is left out, and what says how it turns is in one object, also without a config.json."""
    pico.save(tmp_path / "hf", "qwen3-5", dtype=torch.bfloat16, mtp_num_hidden_layers=1)
    prediction_layer.add_mtp(tmp_path / "hf", torch.bfloat16)
    found = export(tmp_path / "hf", tmp_path / "mlx")
    assert all(name.startswith("language_model.") and "mtp" not in name for name in found)
    config = config_of(tmp_path / "mlx")
    assert (config["model_type"], config["text_config"]["model_type"]) == ("qwen3_5", "qwen3_5_text")
    found_equal = compare(*map(open_checkpoint, (tmp_path / "hf", tmp_path / "mlx")))
    assert found_equal.equal and "prediction" in {each.topic for each in found_equal.not_compared}
    conversions.run(tmp_path / "mlx", tmp_path / "back", "hf")
    export(tmp_path / "back", tmp_path / "again")
    texts = [config_of(tmp_path / name)["text_config"] for name in ("mlx", "again")]
    bases = [text["rope_parameters"]["rope_theta"] for text in texts]
    assert bases == [pico.config("qwen3-5")["rope_parameters"]["rope_theta"]] * 2
    assert texts[1]["full_attention_interval"] == texts[0]["full_attention_interval"] == 4


def test_keys_and_values_that_no_token_reads_are_left_out(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gemma4-small", dtype=torch.bfloat16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors, kinds = load_file(file), ("k_proj", "v_proj", "k_norm")
    unused = {
        f"model.layers.{reads}.self_attn.{kind}.weight": tensors[f"model.layers.{has}.self_attn.{kind}.weight"].clone()
        for has, reads in ((0, 3), (1, 4), (2, 5))
        for kind in kinds
    }
    save_file(tensors | unused, file, {"format": "pt"})
    assert export(tmp_path / "hf", tmp_path / "mlx").keys() == tensors.keys()
    assert compare(*map(open_checkpoint, (tmp_path / "hf", tmp_path / "mlx"))).equal


def test_verify_knows_codes_of_experts_that_are_stored_turned_and_joined(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "gpt-oss", dtype=torch.bfloat16, **WIDE)
    export(tmp_path / "hf", tmp_path / "mlx", "4bit")
    found = compare(*map(open_checkpoint, (tmp_path / "hf", tmp_path / "mlx")))
    coded = {each.name for each in found.tensors if each.status == "encoded"}
    assert found.equal and {"gate_up_proj", "down_proj"} == {
        matrix for name in coded for matrix in ("gate_up_proj", "down_proj") if f".experts.{matrix}" in name
    }


def test_towers_that_mlx_vlm_keeps_are_refused_by_name(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", "qwen3_vl", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "mlx")
    file = tmp_path / "mlx" / "model.safetensors"
    save_file(load_file(file) | {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2)}, file, {"format": "mlx"})
    with pytest.raises(PrecisionError, match="vision_tower.patch_embed.proj.weight.*mlx-vlm"):
        open_checkpoint(tmp_path / "mlx")


def test_a_wrapper_around_another_text_model_than_its_class_of_mlx_lm_has_is_refused() -> None:
    config = {"model_type": "llava", "text_config": pico.config("qwen3"), "vision_config": {}}
    with pytest.raises(UnknownArchitecture, match="no llava around a 'qwen3'"):
        check_loaded(from_hf_config(config))
