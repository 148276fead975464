"""MiniMax-M3: the blocks of keys that a query sees, the words and names of published files, and how they are stored."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import tiny_wrappers
import torch
from any_models import export, load_whole, logits
from conversions import run
from gpt_models import VOCABULARY, as_gpt, backward, clear_tokens, converted, transformers_model
from safetensors.torch import load_file, save_file
from soaking import in_soak
from tiny_wrappers import stored
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, UnmappedTensor
from precisionctl.evaluate import load
from precisionctl.model.sparse_parts import MSA
from precisionctl.param import Parallelism
from precisionctl.trainer.model.attention import block_indexer
from precisionctl.trainer.model.attention.block_indexer import seen
from precisionctl.trainer.model.attention.core_attention import CoreAttention
from precisionctl.trainer.model.positions import Rope
from precisionctl.trainer.sequences import PackedSequences, Positions
from precisionctl.verify.engine_rules import check

FAMILY, WRAPPER = "minimax-m3", "minimax_m3_vl"


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize(("length", "block", "blocks"), [(21, 4, 2), (7, 3, 2), *in_soak((40, 8, 3), (33, 16, 2))])
def test_a_query_sees_the_blocks_that_transformers_chooses(
    length: int, block: int, blocks: int, local: int, tmp_path: Path
) -> None:
    sizes = {"index_block_size": block, "index_topk_blocks": blocks, "index_local_blocks": local}
    theirs = transformers_model(FAMILY, **sizes)
    gpt = as_gpt(converted(theirs, tmp_path))
    core = gpt.decoder.layers[2].self_attention.core_attention
    assert isinstance(core, CoreAttention) and core.msa and core.indexer
    hidden, place = torch.randn(2, length, 64), torch.arange(length)[None]
    with torch.no_grad():
        indexer = theirs.model.layers[2].self_attn.indexer
        chosen = indexer(hidden, theirs.model.rotary_emb(hidden, place), None, place.expand(2, -1))
        mask = indexer.build_block_mask(chosen, None, length, torch.float32, hidden.device, place.expand(2, -1))
        angles = Rope(gpt.model, False, hidden.device).at(place[0], length)
        query, key = core.indexer(hidden.flatten(0, 1), Positions(*angles, None, None, (2, length)))
    for head in range(4):
        ours = seen(query[:, :, head // 2], key[:, :, 0], core.msa)
        assert torch.equal(ours, mask[:, head] == 0)
        assert not torch.equal(ours, torch.ones(length, length, dtype=torch.bool).tril().expand_as(ours))


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """Of texts in which blocks are chosen. The gradients go to Megatron as weights do, by the family's table."""
    theirs = transformers_model(FAMILY)
    ours = as_gpt(converted(theirs, tmp_path / "weights"))
    tokens = clear_tokens(ours, (2, 60))
    backward(ours(tokens)[..., :VOCABULARY], tokens)
    backward(theirs(tokens).logits, tokens)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected, compared = converted(theirs, tmp_path / "gradients").tensors, 0
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None
        scale = float(expected[name].std())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-4 * scale)
        compared += 1
    assert compared > 40


def test_texts_that_share_a_row_are_what_they_are_alone(tmp_path: Path) -> None:
    """Some long enough to choose blocks, which begin anew in each, and some not."""
    gpt, lengths = as_gpt(converted(transformers_model(FAMILY), tmp_path)), (30, 7, 19, 8)
    tokens = torch.randint(VOCABULARY, (1, sum(lengths)))
    with torch.no_grad():
        together = gpt(tokens, packed=PackedSequences(lengths))
        alone = torch.cat([gpt(text) for text in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


TEXT: dict[str, Any] = {  # MiniMaxAI/MiniMax-M3, text_config, but for sizes
    **{name: value for name, value in pico.settings(FAMILY).items() if name not in ("model_type", *pico.NO_TOKENS)},
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "rope_theta": 5000000,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "moe_layer_freq": [0, 1, 1],
    "qk_norm_type": "per_head",
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
    "swiglu_alpha": 1.702,
    "routed_scaling_factor": 2.0,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 4,
        "sparse_disable_index_value": [0, 1, 1],
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1],
    },
}
CLASS_WORDS = (
    "mlp_layer_types",
    "layer_types",
    "rope_parameters",
    *(name for name in TEXT if name.startswith("index_")),
)
PUBLISHED = {"model_type": WRAPPER, "text_config": {key: TEXT[key] for key in TEXT if key not in CLASS_WORDS}}


def test_what_is_published_is_what_transformers_takes_it_for() -> None:
    model = from_hf_config(PUBLISHED)
    assert model == from_hf_config(AutoConfig.for_model(**PUBLISHED).to_dict())
    assert model.msa == pico.shape(FAMILY).msa and model.moe == pico.shape(FAMILY).moe
    written = to_hf_config(model, "bfloat16")
    told = PUBLISHED["text_config"]
    assert isinstance(told, dict)
    unsaid = {"num_mtp_modules", "num_nextn_predict_layers"}
    assert {key: value for key, value in told.items() if key not in unsaid} == {
        key: written[key] for key in told if key not in unsaid
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_dim": 16}, "rotary_dim is 16, and in transformers 8 channels turn"),
        ({"moe_layer_freq": [1, 1, 1], "mlp_layer_types": ["dense", "sparse", "sparse"]}, "say different layers"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types and sparse_attention_freq say different layers"),
        ({"index_topk_blocks": 16}, "index_topk_blocks and sparse_topk_blocks differ"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is .*, not a list of 0 or 1 for each of 3 layers"),
        ({"sparse_attention_config": None}, None),
        ({"sparse_attention_config": [1]}, r"sparse_attention_config is \[1\], not an object"),
    ],
    ids=str,
)
def test_words_that_say_another_model_than_transformers_makes_are_refused(
    change: dict[str, Any], words: str | None
) -> None:
    said = {key: TEXT[key] for key in TEXT if key not in CLASS_WORDS} | {"model_type": "minimax_m3_vl_text"} | change
    if words is None:  # as null
        assert from_hf_config(said).msa is None
        return
    with pytest.raises(DamagedCheckpoint, match=words):
        from_hf_config(said)


@pytest.mark.parametrize(
    ("key", "value"),
    {
        "use_sparse_attention": False,
        "sparse_score_type": "mean",
        "sparse_init_block": 1,
        "sparse_disable_index_value": [0, 0, 1],
        "use_index_cache": True,
        "swiglu_alpha": 1.0,
        "swiglu_beta": 0.0,
        "use_gemma_norm": False,
        "use_qk_norm": False,
        "qk_norm_type": "per_layer",
        "attention_output_gate": True,
        "n_shared_experts": 2,
        "scoring_func": "softmax",
        "use_routing_bias": False,
    }.items(),
)
def test_what_is_not_computed_is_refused_by_the_name_of_its_setting(key: str, value: object) -> None:
    text = {name: TEXT[name] for name in TEXT if name not in CLASS_WORDS} | {"model_type": "minimax_m3_vl_text"}
    sparse = text["sparse_attention_config"]
    text |= {"sparse_attention_config": sparse | {key: value}} if "sparse" in key else {key: value}
    with pytest.raises(UnknownArchitecture, match=f"{key}="):
        from_hf_config(text)


def published(directory: Path) -> dict[str, torch.Tensor]:
    """The wrapper in BF16, with routers in FP32 and biases that choose; its tensors."""
    tiny_wrappers.save(directory, WRAPPER, dtype=torch.bfloat16)
    torch.manual_seed(1)
    tensors = stored(directory)
    for name in tensors:
        if name.endswith((".gate.weight", "e_score_correction_bias")):
            tensors[name] = torch.randn(tensors[name].shape) * 0.1
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def test_a_published_model_comes_back_with_its_routers_in_fp32(tmp_path: Path) -> None:
    tensors = published(tmp_path / "hf")
    assert any(".block_sparse_moe.experts.0.w1." in name for name in tensors)
    assert any(".self_attn.index_q_proj." in name for name in tensors)
    cut = Parallelism(tensor=2, pipeline=3)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", "bf16", parallelism=cut, workers=1)
    run(tmp_path / "megatron", tmp_path / "back", "hf", "bf16", workers=1)
    assert_same(stored(tmp_path / "back"), tensors)


def test_what_transformers_has_in_memory_comes_back_under_these_names(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", WRAPPER, in_memory=True, dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", workers=1)
    for source in ("megatron", "hf"):
        run(tmp_path / source, tmp_path / f"from {source}", "hf", workers=1)
        assert_same(stored(tmp_path / f"from {source}"), stored(tmp_path / "hf"))
    run(tmp_path / "hf", tmp_path / "dcp", "hf", container="dcp", workers=1)
    run(tmp_path / "dcp", tmp_path / "again", "hf", workers=1)
    assert_same(stored(tmp_path / "again"), stored(tmp_path / "hf"))


def test_mxfp8_becomes_values_in_megatron_and_the_same_codes_again(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "mxfp8", "mxfp8", "sglang")
    assert (
        json.loads((tmp_path / "mxfp8" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp8"
    )
    run(tmp_path / "mxfp8", tmp_path / "megatron", "megatron", workers=1)
    run(tmp_path / "megatron", tmp_path / "again", "hf", "fp8", workers=1)
    codes, again = stored(tmp_path / "mxfp8"), stored(tmp_path / "again")
    coded = {name for name in codes if name.endswith("weight_scale_inv")}
    assert any(".w1." in name for name in coded) and any(".mlp.gate_proj." in name for name in coded)
    assert codes.keys() == again.keys()
    for name, tensor in codes.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name


@pytest.mark.parametrize("scheme", ["block", *in_soak("dynamic")])
def test_transformers_computes_with_an_export_what_it_does_with_its_values(scheme: str, tmp_path: Path) -> None:
    published(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "fp8", scheme, "transformers", keep_misfits=True)
    run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16", workers=1)
    coded, values = (load_whole(AutoModelForImageTextToText, tmp_path / name) for name in ("fp8", "values"))
    decoded = values.state_dict()
    there = {name: tensor for name, tensor in coded.state_dict().items() if tensor.dtype == torch.bfloat16}
    compared = [name for name in there if ".experts." in name and torch.equal(there[name], decoded[name])]
    assert len(compared) == 2 * 2
    # inputs are rounded too, and routers choose other experts
    assert torch.cosine_similarity(logits(values).flatten(), logits(coded).flatten(), dim=0) > 0.95


@pytest.mark.parametrize("target", ["vllm", *in_soak("sglang")])
def test_engines_get_experts_one_by_one_under_the_published_names(target: str, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16, hidden_size=128, head_dim=32, rotary_dim=16)
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic", target)
    assert check(open_checkpoint(tmp_path / "fp8"), engine_named(target)) == []
    names = stored(tmp_path / "fp8")
    for part in ("block_sparse_moe.experts.7.w3.weight", "self_attn.index_k_norm.weight", "mlp.up_proj.weight"):
        assert any(name.endswith(part) for name in names), part
    assert names["model.layers.2.self_attn.index_q_proj.weight"].dtype == torch.float8_e4m3fn
    export(tmp_path / "hf", tmp_path / "values", "dynamic", target, exclude=("*.layers.2.self_attn.k_proj",))
    names = stored(tmp_path / "values")
    assert names["model.layers.2.self_attn.index_q_proj.weight"].dtype == torch.bfloat16


def test_an_indexer_in_another_form_than_the_queries_is_found(tmp_path: Path) -> None:
    """As others export it: vLLM would leave it out, and choose blocks by what its memory has there."""
    published(tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic")
    tensors = stored(tmp_path / "fp8")
    left = "language_model.model.layers.2.self_attn.index_k_proj"
    tensors[f"{left}.weight"] = stored(tmp_path / "hf")[f"{left}.weight"]
    del tensors[f"{left}.weight_scale"]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(left)
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    (found,) = check(open_checkpoint(tmp_path / "fp8"), engine_named("vllm"))
    assert found.rule.fatal and "not all that it is fused with" in str(found)


def test_a_text_model_under_the_published_names_gets_those_that_its_class_reads(tmp_path: Path) -> None:
    tensors = published(tmp_path / "whole")
    text = {
        name.removeprefix("language_model."): each for name, each in tensors.items() if name.startswith("language_")
    }
    (tmp_path / "text").mkdir()
    save_file(text, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["text_config"]
    (tmp_path / "text" / "config.json").write_text(json.dumps(config))
    run(tmp_path / "text", tmp_path / "hf", "hf", workers=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(whole))
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", workers=1)
    run(tmp_path / "megatron", tmp_path / "back", "hf", workers=1)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))


def test_what_fp8_changes_more_than_in_other_families_is_the_choice_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the blocks that BF16 chooses, the logits are three times as near to BF16's."""
    pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16, hidden_size=128, head_dim=32, rotary_dim=16)
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic", "vllm")
    values, codes = (load(open_checkpoint(tmp_path / name))[0] for name in ("hf", "fp8"))
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0))
    chosen: list[torch.Tensor] = []

    def kept(query: torch.Tensor, key: torch.Tensor, msa: MSA) -> torch.Tensor:
        chosen.append(seen(query, key, msa))
        return chosen[-1]

    with torch.no_grad():
        monkeypatch.setattr(block_indexer, "seen", kept)
        expected = values(tokens)
        again = iter(list(chosen))
        free = codes(tokens) - expected
        monkeypatch.setattr(block_indexer, "seen", lambda *heads: next(again))
        fixed = codes(tokens) - expected
    assert next(again, None) is None
    assert fixed.norm() < 0.5 * free.norm() and fixed.norm() < 0.15 * expected.norm()


def test_prediction_layers_are_refused_by_their_names(tmp_path: Path) -> None:
    """Published files have none, whatever config.json counts."""
    tensors = published(tmp_path / "hf") | {"language_model.model.mtp.0.fc.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnmappedTensor, match=r"language_model\.model\.mtp\.0\.fc\.weight"):
        run(tmp_path / "hf", tmp_path / "megatron", "megatron")


@pytest.mark.parametrize("alone", [False, True])
def test_an_export_for_vllm_has_the_words_that_transformers_does_not_save(tmp_path: Path, alone: bool) -> None:
    """Without them vLLM takes those of the released model's 60 layers, and it refuses `silu`."""
    if alone:
        pico.save(tmp_path / "hf", FAMILY, dtype=torch.bfloat16, hidden_size=128, head_dim=32, rotary_dim=16)
    else:
        published(tmp_path / "hf")
    found = check(open_checkpoint(tmp_path / "hf"), engine_named("vllm"))
    told = ["moe_layer_freq", "sparse_attention_config", "rope_theta", "partial_rotary_factor"]
    assert [each.what for each in found][:5] == ["hidden_act is 'silu'", *(f"no {key}" for key in told)]
    export(tmp_path / "hf", tmp_path / "fp8", "dynamic", "vllm")
    assert check(open_checkpoint(tmp_path / "fp8"), engine_named("vllm")) == []
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    text = config if alone else config["text_config"]
    assert text["moe_layer_freq"] == [int(kind == "sparse") for kind in text["mlp_layer_types"]]
    flags = text["sparse_attention_config"]["sparse_attention_freq"]
    assert (
        flags == [int(kind == "minimax_m3_sparse") for kind in text["layer_types"]]
        and text["hidden_act"] == "swigluoai"
    )
    assert alone or not set(told) & config.keys()
    configs = [AutoConfig.from_pretrained(tmp_path / name).get_text_config() for name in ("hf", "fp8")]
    assert all(getattr(configs[0], key) == getattr(configs[1], key) for key in ("layer_types", "rope_parameters"))
