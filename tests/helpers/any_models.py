"""Tiny models of whatever kind transformers registers: its own default config, with small sizes in it. And what an
export of one must be."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conversions import carry_out, run
from installed import need_loader
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.conversion.command import PlannedCommand
from precisionctl.engines.base import engine_named
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "out_hidden_size"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "block_ff_dim"), 256),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 256),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("intermediate_size_mlp",), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "depth", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "global_head_dim", "mamba_head_dim"), 64),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "num_expert_group"), 1),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_latent_dim"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim", "qk_rope_head_dim"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("image_size",), 28),
    **dict.fromkeys(("patch_size",), 14),
    "index_topk": 4,
    "sliding_window": 8,
    "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "mamba_d_ssm": 256,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "time_step_rank": 16,
    "n_shared_experts": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "transformers_version", "dtype", "per_layer_config"),
    *("activation_sparsity_pattern", "num_attention_heads_per_layer", "full_attn_idxs", "no_rope_layers"),
)
"""Keys with an entry for each layer: the config's class makes them anew."""

KINDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 16},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), {"num_hidden_layers": 4}
    ),
}
"""Kinds of models, and what of their configs is not in SMALL."""

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
_SMALL_TEXT = {
    **{key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")},
    **{key: SMALL[key] for key in ("vocab_size", "max_position_embeddings")},
    "num_hidden_layers": 3,
}
_SMALL_TOWER = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "patch_size")}
IN_PARTS: dict[str, dict[str, Any]] = {
    "mllama": {
        "text_config": _SMALL_TEXT
        | _TOKENS
        | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | {"tie_word_embeddings": False},
        "vision_config": _SMALL_TOWER
        | {"image_size": 28, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
        | {"vision_output_dim": 256, "intermediate_layers_indices": [0], "max_num_tiles": 2}
        | {"supported_aspect_ratios": [[1, 1], [1, 2]]},
        "image_token_index": 256,
    },
    "ernie4_5_vl_moe": {
        "text_config": _SMALL_TEXT
        | _TOKENS
        | {"head_dim": 32, "moe_intermediate_size": [128, 64], "moe_num_experts": 4, "moe_k": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [5, 5, 6]}},
        "vision_config": _SMALL_TOWER | {"depth": 2, "num_heads": 4},
        "tie_word_embeddings": True,
    },
}
"""Kinds of images and text that no size fits which is in all parts."""

_AUTO = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModel)


def shrunk(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The same config with small sizes, in the configs within it too."""
    small = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = shrunk(value, changes)
        elif key in changes:
            small[key] = changes[key]
        elif key.endswith("token_id"):
            small[key] = SMALL.get(key, 250 if isinstance(value, int) else value)
        elif key in SMALL:
            small[key] = value if value is None else SMALL[key]
        elif key not in _BY_LAYER:
            small[key] = value
    return small


def make(model_type: str, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model of a type, with small sizes and these `changes`. A test is skipped where the
    installed transformers does not have the type: InternLM3 is newer than 5.17."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    if model_type in IN_PARTS:
        config, auto = AutoConfig.for_model(model_type, **IN_PARTS[model_type] | changes), AutoModelForImageTextToText
    else:
        changes = KINDS.get(model_type, {}) | changes
        told = AutoConfig.for_model(model_type).to_dict()
        config = AutoConfig.for_model(**{"model_type": model_type} | shrunk(told, changes))
        auto = next(each for each in _AUTO if type(config) in each._model_mapping)
    model: PreTrainedModel = auto.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if re.search(r"norm|ln_|bias$", name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.to(dtype).eval()


def save(directory: Path, model_type: str, **settings: Any) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(model_type, **settings)
    model.save_pretrained(directory)
    return model


def publish_ernie_vl(theirs: Path, directory: Path) -> None:
    """Save an `ernie4_5_vl_moe` that transformers saved in the form of Baidu's own code, which vLLM and SGLang read:
    sizes of the text model are at the top of config.json, with a class of its own, and what chooses experts is FP32."""
    directory.mkdir()
    tensors = load_file(theirs / "model.safetensors")
    tensors = {name.removeprefix("model.") if "vision_model" in name else name: t for name, t in tensors.items()}
    chooses = re.compile(r".+\.mlp\.(gate|moe_statics)\..+")
    tensors = {name: tensor.float() if chooses.fullmatch(name) else tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    text, tower = config.pop("text_config"), config.pop("vision_config")
    rope, layers, experts = text.pop("rope_parameters"), text.pop("mlp_layer_types"), text["moe_num_experts"]
    sparse = [layer for layer, kind in enumerate(layers) if kind == "sparse"]
    of_both = {"moe_num_experts": experts, "moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
    words = {
        "model_type": "ernie4_5_moe_vl",
        "auto_map": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoeConfig"},
        **{key: [size, size] for key, size in of_both.items()},
        "moe_layer_interval": 1,
        "rope_theta": rope["rope_theta"],
        "rope_3d": True,
        "freq_allocation": rope["mrope_section"][-1],
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
        "pixel_hidden_size": tower["hidden_size"],
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "im_patch_id": config["image_token_id"],
        "vision_config": tower | {"embed_dim": tower["hidden_size"], "mlp_ratio": 2, "spatial_merge_size": 2},
    }
    (directory / "config.json").write_text(json.dumps(config | text | words))
    (directory / "configuration_ernie4_5_vl.py").write_text("")


def load_whole(kind: Any, directory: Path) -> PreTrainedModel:
    """What transformers makes of a directory, which must have every tensor that it looks for, and no other; `kind` is
    its class, or one that finds it. Skips the test where transformers lacks a package to load it."""
    need_loader(directory)
    model, found = kind.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(3, 15).unsqueeze(0)
    decoder = {"decoder_input_ids": tokens[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens, use_cache=False, **decoder)[0]
    return found


def export(source: Path, out: Path, scheme: str = "dynamic", target: str = "vllm", **more: Any) -> PlannedCommand:
    request = Request.export(source, out, target, scheme, **more)  # type: ignore[arg-type]
    return carry_out(request, workers=1)


def same(a: Path, b: Path) -> bool:
    return compare(open_checkpoint(a), open_checkpoint(b)).equal


def check_there_and_back(source: Path, room: Path, scheme: str) -> None:
    """That an export to `room` has the slow reference's codes and breaks no rule of vLLM's, that it decodes to the
    reference's values, and that `verify` finds all of that, and one flipped bit."""
    fp8, back = room / "fp8", room / "back"
    command = export(source, fp8, scheme)
    wanted = check_codes(source, fp8, scheme)
    found = check(open_checkpoint(fp8), engine_named("vllm"))
    assert command.plan.codes and not [one for one in found if one.where != "config.json"]  # whose keys a table knows
    run(fp8, back, "hf", "bf16", workers=1)
    decoded = stored(back)
    assert decoded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert decoded[name].dtype == tensor.dtype and torch.equal(_bytes(decoded[name]), _bytes(tensor)), name
    assert same(source, fp8) and same(fp8, back)
    flip_a_bit(fp8, command.plan.codes[0])
    assert not same(source, fp8) and not same(fp8, back)


def flip_a_bit(directory: Path, name: str) -> None:
    """The last one of a tensor's first byte."""
    (chunk,) = open_checkpoint(directory).chunks(name)
    assert isinstance(chunk.place, Path)
    data = bytearray(chunk.place.read_bytes())
    data[chunk.offset] ^= 1
    chunk.place.write_bytes(data)


def untabled(config: Any, where: object = "", stored: Any = ()) -> UntabledModel:
    """A model whatever its family, as one that no table describes."""
    return UntabledModel(config["model_type"], config, UnknownArchitecture("read off, for this test"))


_BY_FAMILY = huggingface.read_model


def assert_as_tabled(root: Path, scheme: str, monkeypatch: pytest.MonkeyPatch, *, knows_more: bool = False) -> None:
    """That `root / "source"` has the same export by its family's table as by the one that is read off it; where the
    table `knows_more`, such as published names, that what both make codes of has the same ones."""
    for name, read_model in (("tabled", _BY_FAMILY), ("read off", untabled)):
        monkeypatch.setattr(huggingface, "read_model", read_model)
        export(root / "source", root / name, scheme, keep_misfits=True)
    one, other = stored(root / "tabled"), stored(root / "read off")
    if knows_more:
        codes, others = ({n for n, tensor in each.items() if tensor.dtype.itemsize == 1} for each in (one, other))
        assert codes & others and one.keys() & other.keys() > codes & others
        assert [name for name in codes & others if not torch.equal(_bytes(one[name]), _bytes(other[name]))] == []
        return
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(_bytes(tensor), _bytes(other[name])), name
    configs = [json.loads((root / name / "config.json").read_text()) for name in ("tabled", "read off")]
    ignored = [set(config.pop("quantization_config")["ignore"]) for config in configs]
    assert ignored[0] >= ignored[1]  # a table also knows what modules are called in memory
    assert configs[0] == configs[0] | configs[1]  # engines look for keys that only a table knows


# What an export must be, computed slowly and from the formats' definitions alone

_POSITIVE = [
    (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:-1]
"""What the codes 0 to 126 of E4M3 stand for; 127 is NaN."""


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """The E4M3 code of each number: the nearest, of two the even one, beyond 448 that of 448."""
    table = np.array(_POSITIVE)
    magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    down, up = magnitude - table[above - 1], table[above] - magnitude
    code = np.where((down < up) | ((down == up) & ((above - 1) % 2 == 0)), above - 1, above)
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def slow_scales(values: np.ndarray, block: tuple[int, int], scheme: str) -> np.ndarray:
    """scale_inv of each block, FP32: its largest magnitude over 448; for MXFP8 the next power of two."""
    high, wide = block
    rows, columns = -(-values.shape[0] // high), -(-values.shape[1] // wide)
    grid = np.zeros((rows, columns), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            part = values[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
            grid[row, column] = np.abs(part).max().astype(np.float32) / np.float32(448)
    if scheme == "mxfp8":
        return np.exp2(np.ceil(np.log2(grid.astype(np.float64)))).astype(np.float32)
    return grid


def check_codes(source: Path, exported: Path, scheme: str) -> dict[str, torch.Tensor]:
    """That every tensor of an export is either the source's to the byte, or the nearest codes under the scales that its
    values give. Returns what these decode to in BF16, and the rest as it is: the tensors of the decoded directory."""
    before, after = stored(source), stored(exported)
    decoded, scales = {}, set()
    for name, tensor in before.items():
        if after[name].dtype != torch.float8_e4m3fn:
            assert after[name].dtype == tensor.dtype and torch.equal(_bytes(after[name]), _bytes(tensor)), name
            decoded[name] = tensor
            continue
        values = tensor.float().numpy()
        stem = name.removesuffix(".weight")
        scale = next(f"{stem}.{kind}" for kind in ("weight_scale", "weight_scale_inv") if f"{stem}.{kind}" in after)
        scales.add(scale)
        block = {"dynamic": (1, values.shape[1]), "block": (128, 128), "mxfp8": (1, 32)}[scheme]
        wanted = slow_scales(values, block, scheme)
        found = after[scale]
        if scheme == "mxfp8":
            found = torch.exp2(found.float() - 127)
        assert np.array_equal(found.float().numpy().reshape(wanted.shape), wanted), scale
        spread = np.repeat(np.repeat(wanted, block[0], 0), block[1], 1)[: values.shape[0], : values.shape[1]]
        codes = nearest_codes(values / np.where(spread == 0, 1, spread))
        assert np.array_equal(after[name].view(torch.uint8).numpy(), codes), name
        numbers = np.array(_POSITIVE + [0], dtype=np.float32)[codes & 127] * np.where(codes & 128, -1, 1)
        decoded[name] = torch.from_numpy(numbers.astype(np.float32) * spread).bfloat16()
    assert after.keys() - before.keys() == scales
    return decoded


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of a directory."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
