"""Every incompatibility that is known of FP8 directories and engines, each in an example made for it.

A case is a directory that loads, one thing in it changed, and the engines that refuse that, or pay for it.
"""

import json
import random
import time
from pathlib import Path

import in_memory
import pico
import pytest
import torch
from engine_exports import BF16, ENGINES, LAYER, LINEARS, METHODS, exported
from installed import BEFORE_5_23
from transformers.quantizers.quantizers_utils import should_convert_module

from precisionctl.architectures.wrappers import WRAPPERS
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named, engines
from precisionctl.engines.rules.ignore_lists import (
    BY_GLOB,
    BY_NAME,
    BY_NAME_OR_REGEX,
    BY_PART_OR_GLOB,
    BY_PATH,
    BY_START_REGEX_OR_END,
    Matching,
)
from precisionctl.engines.serving import ServingLayout
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES
from precisionctl.verify.engine_rules import check

EVERYONE = set(ENGINES)
FP32 = DType.float32


class Made:
    """A directory in a method and scheme, to be changed."""

    def __init__(self, method: str, scheme: str, experts: bool = False) -> None:
        spelling = METHODS[method].spelling
        writable = scheme if scheme in ("static", "dynamic", "block", "mxfp8") else "static"
        self.specs = dict(BF16)
        linears = dict(LINEARS)
        if experts:
            linears = {name: shape for name, shape in linears.items() if ".mlp." not in name}
            linears |= {
                f"{LAYER}.mlp.experts.{expert}.{part}_proj": (256, 256)
                for expert in range(2)
                for part in ("gate", "up", "down")
            }
            self.specs[f"{LAYER}.mlp.gate.weight"] = TensorSpec((2, 256), DType.bfloat16)
        for module, shape in linears.items():
            weight = TensorSpec(shape, CODES)
            self.specs[f"{module}.weight"] = weight
            scales = METHODS[method].scales(f"{module}.weight", weight, writable)
            self.specs |= spelling.specs(scales, weight, spelling.form(writable))
        ignored = ["lm_head", "model.embed_tokens", *([f"{LAYER}.mlp.gate"] if experts else [])]
        if (method, writable) in (("compressed-tensors", "block"), ("modelopt", "block"), ("fp8", "static")):
            self.quantization = ONLY_READ[method, writable](ignored)
        else:
            self.quantization = spelling.config(writable, ignored)
        self.values: dict[str, float] = {}
        self.beside = None

    def check(self, engine: str, ranks: int = 1):
        read = lambda name: torch.tensor([self.values.get(name, 1.0)])  # noqa: E731
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        config = heads | {"quantization_config": self.quantization}
        return ENGINES[engine].check(config, self.specs, read, ServingLayout.of(config, ranks), self.beside)

    def renamed(self, old: str, new: str) -> "Made":
        """Scales under another name."""
        self.specs = {name.replace(f".{old}", f".{new}"): spec for name, spec in self.specs.items()}
        return self

    def having(self, name: str, shape: tuple[int, ...], dtype: DType = FP32) -> "Made":
        self.specs[name] = TensorSpec(shape, dtype)
        return self

    def saying(self, **keys) -> "Made":
        self.quantization |= keys
        return self

    def without(self, *keys: str) -> "Made":
        for key in keys:
            del self.quantization[key]
        return self


def of_blocks(ignored):
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    found = METHODS["compressed-tensors"].spelling.config("static", ignored)
    return found | {"config_groups": {"group_0": group}}


def of_parts(*, inputs=None, experts=False, **weights):
    """compressed-tensors' codes with a scale for each group of 64 or block, as weights alone or with FP8 inputs."""
    made = ct(experts=experts)
    high, wide = weights.get("block_structure", (1, weights.get("group_size")))
    for name in [name for name, spec in made.specs.items() if spec.dtype == CODES]:
        rows, columns = made.specs[name].shape
        made.having(name.replace(".weight", ".weight_scale"), (-(-rows // high), -(-columns // wide)))
        if inputs is None or inputs["dynamic"]:
            del made.specs[name.replace(".weight", ".input_scale")]
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    made.quantization["config_groups"]["group_0"] |= {"weights": weights, "input_activations": inputs}
    return made


GROUPS = {"strategy": "group", "group_size": 64}
FIXED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BY_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}

ONLY_READ = {
    ("compressed-tensors", "block"): of_blocks,
    ("modelopt", "block"): lambda ignored: {
        "quant_method": "modelopt",
        "quant_algo": "fp8_pb_wo",
        "ignore": list(ignored),
    },
    ("fp8", "static"): lambda ignored: {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": list(ignored),
    },
}

Q, K, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.down_proj"
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def ct(scheme="static", **more):
    return Made("compressed-tensors", scheme, **more)


def of_vllm():
    """`quant_method: fp8` with a scale for a tensor, under vLLM's names."""
    return Made("fp8", "static").renamed("weight_scale_inv", "weight_scale").renamed("activation_scale", "input_scale")


def channels_with_fixed_inputs(**more):
    made = ct("dynamic", **more)
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    made.quantization["config_groups"]["group_0"]["input_activations"] = inputs
    for name in [name for name, spec in made.specs.items() if spec.dtype == CODES]:
        made.having(name.replace(".weight", ".input_scale"), (1,))
    return made


def with_cache(made, k="self_attn.k_scale", v="self_attn.v_scale", **scheme):
    if made.quantization["quant_method"] == "compressed-tensors":
        made.saying(kv_cache_scheme=KV | scheme)
    else:
        made.saying(kv_cache_quant_algo="FP8")
    return made.having(f"{LAYER}.{k}", (1,)).having(f"{LAYER}.{v}", (1,))


def left_in_bf16(made, module, entry, key):
    """A linear that is no codes, and an entry of the list that means it, or does not."""
    made.specs = {name: spec for name, spec in made.specs.items() if not name.startswith(f"{module}.")}
    made.having(f"{module}.weight", LINEARS[module], torch.bfloat16)
    made.quantization[key] = [*made.quantization[key], entry]
    return made


def with_indexer(made):
    """MiniMax-M3's, in BF16."""
    modules = [f"{LAYER}.self_attn.index_{part}_proj" for part in "qk"]
    for module in modules:
        made.having(f"{module}.weight", (128, 256), torch.bfloat16)
    return made.saying(ignore=[*made.quantization["ignore"], *modules])


def one_group(*targets):
    made = ct("dynamic")
    (group,) = made.quantization["config_groups"].values()
    return made.saying(config_groups={"group_0": group | {"targets": list(targets)}})


def two_groups(*targets):
    made = ct("dynamic")
    (group,) = made.quantization["config_groups"].values()
    groups = {f"group_{i}": group | {"targets": [target]} for i, target in enumerate(targets)}
    return made.saying(config_groups=groups)


def formats(of_all, of_group=None):
    """A format for all config groups, and one that the group has itself."""
    made = ct("dynamic")
    if of_group:
        made.quantization["config_groups"]["group_0"]["format"] = of_group
    return made.saying(format=of_all)


def two_kinds(*targets, swapped=False):
    """Attention with scales of channels, MLPs with those of tensors, in groups with these targets."""
    made, static = ct("dynamic"), ct()
    of_mlp = {name: spec for name, spec in static.specs.items() if ".mlp." in name}
    made.specs = {name: spec for name, spec in made.specs.items() if ".mlp." not in name} | of_mlp
    groups = [each.quantization["config_groups"]["group_0"] for each in (made, static)]
    groups = groups[::-1] if swapped else groups
    both = {target: group | {"targets": [target]} for target, group in zip(targets, groups, strict=True)}
    return made.saying(config_groups=both)


def mixed_modelopt(*, attention):
    """Attention and MLPs in FP8, as `quantized_layers` says of each linear, or of all attention's by a path."""
    made = Made("modelopt", "static")
    layers = {module: {"quant_algo": "FP8"} for module in LINEARS if ".mlp." in module}
    layers |= {module: {"quant_algo": "FP8"} for module in (attention or [m for m in LINEARS if "self_attn" in m])}
    return made.saying(quant_algo="MIXED_PRECISION", quantized_layers=layers, ignore=[])


def modelopt_twice(**other):
    made = Made("modelopt", "static")
    nested = {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.embed_tokens"]}
    made.beside = {"quantization": nested | other}
    return made


def with_coded_head(made, *target):
    made.having("lm_head.weight", (512, 256), CODES).having("lm_head.weight_scale", (512, 1))
    (group,) = made.quantization["config_groups"].values()
    group["targets"] = ["Linear", *target]
    return made.saying(ignore=["model.embed_tokens"])


def reshaped(made, name, *shape):
    return made.having(name, shape, made.specs[name].dtype)


def of_one_tensor(method="fp8", scheme="block"):
    made = Made(method, scheme)
    for part in range(2):
        made.having(f"{LAYER}.mlp.experts.gate_up_proj[{part}]", (256, 256), CODES)
        made.having(f"{LAYER}.mlp.experts.gate_up_proj_scale_inv[{part}]", (2, 2))
    return made


def unequal(made, *names):
    made.values = {name: 0.5 for name in names}
    return made


# what it is, where facts of engines have it; the directory; who refuses it; who pays for it
CASES = {
    # which spelling which engine reads
    "A, static compressed-tensors": (ct, {"tensorrt-llm"}, set()),
    "B, dynamic compressed-tensors": (lambda: ct("dynamic"), set(), set()),
    "C, blocks in compressed-tensors": (lambda: ct("block"), set(), set()),
    "C, of experts": (lambda: ct("block", experts=True), {"sglang", "tensorrt-llm", "transformers"}, set()),
    "C, groups": (lambda: of_parts(**GROUPS), EVERYONE - {"transformers"}, set()),
    "C, groups of 32 under floats, which is no MXFP8": (
        lambda: of_parts(strategy="group", group_size=32),
        EVERYONE - {"transformers"},
        set(),
    ),
    "C, groups, inputs by fixed scales": (lambda: of_parts(**GROUPS, inputs=FIXED), EVERYONE - {"transformers"}, set()),
    "C, groups of experts": (lambda: of_parts(**GROUPS, experts=True), EVERYONE, set()),
    "C, blocks of other sizes": (
        lambda: of_parts(strategy="block", block_structure=[64, 128], inputs=BY_GROUP),
        EVERYONE - {"transformers"},
        set(),
    ),
    "C, blocks that end outside of the weights": (
        lambda: of_parts(strategy="block", block_structure=[96, 160]),
        EVERYONE - {"transformers"},
        set(),
    ),
    "C, groups that end outside of the weights": (lambda: of_parts(strategy="group", group_size=96), EVERYONE, set()),
    "D, DeepSeek's blocks": (lambda: Made("fp8", "block"), set(), set()),
    "E, per tensor under vLLM's names": (of_vllm, {"tensorrt-llm", "transformers"}, set()),
    "F, per tensor under transformers' names": (lambda: Made("fp8", "static"), EVERYONE - {"transformers"}, set()),
    "G, static ModelOpt": (lambda: Made("modelopt", "static"), {"transformers"}, set()),
    "H, ModelOpt's channels": (lambda: Made("modelopt", "dynamic"), {"sglang", "transformers"}, set()),
    "I, ModelOpt's blocks": (lambda: Made("modelopt", "block"), {"sglang", "transformers"}, set()),
    "J, ModelOpt's MXFP8": (lambda: Made("modelopt", "mxfp8"), {"transformers"}, set()),
    "MXFP8 as SGLang and MiniMax write it": (lambda: Made("mxfp8", "mxfp8"), {"vllm"}, set()),
    "the same, of experts": (lambda: Made("mxfp8", "mxfp8", experts=True), {"vllm"}, set()),
    "the same, of blocks that are not said": (
        lambda: Made("mxfp8", "mxfp8").without("weight_block_size"),
        {"vllm"},
        {"transformers"},
    ),
    "the same, of bytes that are not said to be exponents": (
        lambda: Made("mxfp8", "mxfp8").without("scale_fmt"),
        {"vllm"},
        {"transformers"},
    ),
    "the same under ModelOpt's name, without words for SGLang": (
        lambda: Made("mxfp8", "mxfp8").renamed("weight_scale_inv", "weight_scale").without("activation_scheme"),
        {"sglang", "transformers"},
        set(),
    ),
    "K, MXFP8 in compressed-tensors": (lambda: ct("mxfp8"), {"sglang", "tensorrt-llm"}, set()),
    "channels with fixed inputs": (channels_with_fixed_inputs, {"sglang", "tensorrt-llm"}, set()),
    "channels with fixed inputs, of experts": (lambda: channels_with_fixed_inputs(experts=True), EVERYONE, set()),
    "NVFP4": (lambda: ct().saying(quant_method="modelopt", quant_algo="NVFP4"), EVERYONE, set()),
    "a method that nobody has": (lambda: ct().saying(quant_method="fp9"), EVERYONE, set()),
    # keys of the config
    "no activation_scheme": (lambda: Made("fp8", "block").without("activation_scheme"), {"vllm", "sglang"}, set()),
    "blocks and no weight_block_size": (
        lambda: Made("fp8", "block").without("weight_block_size"),
        {"vllm", "sglang"},
        set(),
    ),
    "one scale and no weight_block_size": (
        lambda: Made("fp8", "static").without("weight_block_size"),
        EVERYONE,
        set(),
    ),
    "one scale and no weight_block_size, vLLM's": (
        lambda: of_vllm().without("weight_block_size"),
        {"tensorrt-llm", "transformers"},
        set(),
    ),
    "a format of weights alone": (
        lambda: ct("dynamic").saying(format="pack-quantized"),
        set(),
        {"vllm", "sglang"},
    ),
    "several groups by class": (lambda: two_groups("Linear", "LlamaAttention"), {"tensorrt-llm"}, set()),
    "several groups by name": (lambda: two_groups("re:.*self_attn.*", "re:.*mlp.*"), set(), set()),
    "several kinds by name": (lambda: two_kinds("re:.*self_attn.*", "re:.*mlp.*"), {"tensorrt-llm"}, set()),
    "several kinds, those of the other": (
        lambda: two_kinds("re:.*self_attn.*", "re:.*mlp.*", swapped=True),
        EVERYONE,
        set(),
    ),
    "several kinds, a class for the rest": (lambda: two_kinds("re:.*self_attn.*", "Linear"), {"tensorrt-llm"}, set()),
    "several kinds, fused linears by the names of their parts": (
        lambda: two_kinds(r"re:.*\.(q|k|v|o)_proj$", "Linear"),
        {"sglang", "tensorrt-llm"},
        set(),
    ),
    "several kinds, of which two expressions mean one": (
        lambda: two_kinds("re:.*self_attn.*", "re:.*layers.*"),
        {"transformers", "tensorrt-llm"},  # transformers has them in the order of the alphabet
        set(),
    ),
    "values that no target means": (
        lambda: left_in_bf16(one_group("re:.*self_attn.*", "re:.*(gate|up)_proj"), DOWN, "lm_head", "ignore"),
        {"sglang"},
        set(),
    ),
    "ModelOpt's layers by name": (lambda: mixed_modelopt(attention=None), {"transformers"}, set()),
    "ModelOpt's layers by a path": (lambda: mixed_modelopt(attention=[f"{LAYER}.self_attn"]), EVERYONE, set()),
    "ModelOpt's files agree": (modelopt_twice, {"transformers"}, set()),
    "ModelOpt's files name other algorithms": (
        lambda: modelopt_twice(quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
        {"tensorrt-llm", "transformers"},
        set(),
    ),
    "ModelOpt's files leave out other modules": (
        lambda: modelopt_twice(exclude_modules=["lm_head"]),
        {"tensorrt-llm", "transformers"},
        set(),
    ),
    # names of what is left out, which each reads in its own way
    "left out by its name": (
        lambda: left_in_bf16(Made("fp8", "block"), DOWN, DOWN, "modules_to_not_convert"),
        set(),
        set(),
    ),
    "left out by a path": (
        lambda: left_in_bf16(Made("fp8", "block"), DOWN, "layers.0.mlp.down_proj", "modules_to_not_convert"),
        {"vllm", "tensorrt-llm"},
        set(),
    ),
    "left out by the end of its name": (
        lambda: left_in_bf16(Made("fp8", "block"), DOWN, "down_proj", "modules_to_not_convert"),
        EVERYONE - {"transformers"},
        set(),
    ),
    "left out by a glob": (
        lambda: left_in_bf16(Made("fp8", "block"), DOWN, "*.down_proj", "modules_to_not_convert"),
        EVERYONE - {"tensorrt-llm"},
        set(),
    ),
    "left out by a regular expression": (
        lambda: left_in_bf16(ct("dynamic"), DOWN, r"re:.*\.down_proj$", "ignore"),
        set(),
        set(),
    ),
    "left out by a part of its name, in ModelOpt": (
        lambda: left_in_bf16(Made("modelopt", "static"), DOWN, "mlp.down_proj", "ignore"),
        {"tensorrt-llm", "transformers"},
        set(),
    ),
    "left out under the other key, which counts": (
        lambda: left_in_bf16(Made("fp8", "block").saying(ignored_layers=["lm_head"]), DOWN, DOWN, "ignored_layers"),
        {"tensorrt-llm", "transformers"},
        set(),
    ),
    "left out under the key that does not count": (
        lambda: left_in_bf16(
            Made("fp8", "block").saying(ignored_layers=["lm_head"]), DOWN, DOWN, "modules_to_not_convert"
        ),
        {"vllm", "sglang"},
        set(),
    ),
    "codes that a shorter name leaves out": (
        lambda: ct("dynamic").saying(ignore=["lm_head", "re:.*mlp.*"]),
        EVERYONE,
        set(),
    ),
    "a head that no list names": (
        lambda: ct("dynamic").saying(ignore=["model.embed_tokens"]),
        {"transformers", "tensorrt-llm"},
        set(),
    ),
    "a head that no list names, in ModelOpt": (
        lambda: Made("modelopt", "static").saying(ignore=["model.embed_tokens"]),
        EVERYONE,
        set(),
    ),
    "a head in codes": (lambda: with_coded_head(ct("dynamic")), {"vllm", "sglang"}, set()),
    "a head in codes, which a target names": (
        lambda: with_coded_head(ct("dynamic"), "re:.*lm_head"),
        set(),
        set(),
    ),
    "an indexer left out beside attention, of which SGLang makes a linear of its own": (
        lambda: with_indexer(ct("dynamic")),
        {"vllm", "tensorrt-llm"},
        set(),
    ),
    "left out by the end of its path": (
        lambda: left_in_bf16(ct("dynamic"), DOWN, "mlp.down_proj", "ignore"),
        EVERYONE - {"sglang"},
        set(),
    ),
    "a router that is not left out": (  # of other models, see test_engine_lists.py
        lambda: ct("dynamic", experts=True).saying(ignore=["lm_head"]),
        {"tensorrt-llm"},
        set(),
    ),
    "some of a fused group left out": (
        lambda: left_in_bf16(ct("dynamic"), K, K, "ignore"),
        EVERYONE - {"transformers"},
        set(),
    ),
    # scales: names, shapes, dtypes
    "channels of one dimension": (
        lambda: reshaped(ct("dynamic"), f"{Q}.weight_scale", 256),
        EVERYONE,
        set(),
    ),
    "channels of two dimensions, in ModelOpt": (
        lambda: reshaped(Made("modelopt", "dynamic"), f"{Q}.weight_scale", 256, 1),
        EVERYONE,
        set(),
    ),
    "a scale of no dimension": (
        lambda: reshaped(ct(), f"{Q}.weight_scale"),
        {"transformers", "tensorrt-llm"},
        set(),
    ),
    "blocks under the name of a tensor's scale": (
        lambda: Made("fp8", "block").renamed("weight_scale_inv", "weight_scale"),
        EVERYONE - {"tensorrt-llm"},
        set(),
    ),
    "UE8M0 scales, packed": (
        lambda: Made("fp8", "block").having(f"{Q}.weight_scale_inv", (256, 1), DType.int32),
        EVERYONE,
        set(),
    ),
    "UE8M0 scales, as bytes": (
        lambda: Made("fp8", "block").having(f"{Q}.weight_scale_inv", (2, 2), DType.float8_e8m0fnu),
        set(),
        set(),
    ),
    "E5M2 codes": (lambda: ct("dynamic").having(f"{Q}.weight", (256, 256), torch.float8_e5m2), EVERYONE, set()),
    "no input scale": (
        lambda: (made := Made("modelopt", "static"), made.specs.pop(f"{Q}.input_scale"))[0],
        EVERYONE,
        set(),
    ),
    # scales: values
    "other weight scales in a fused group": (
        lambda: unequal(ct(), f"{K}.weight_scale"),
        {"tensorrt-llm"},
        EVERYONE - {"tensorrt-llm"},
    ),
    "other input scales of experts": (
        lambda: unequal(ct(experts=True), *(f"{LAYER}.mlp.experts.1.{p}_proj.input_scale" for p in ("gate", "up"))),
        {"tensorrt-llm"},
        EVERYONE - {"tensorrt-llm"},
    ),
    # experts
    "experts in one tensor": (of_one_tensor, EVERYONE - {"transformers"}, {"transformers"}),
    # the KV cache
    "a cache in compressed-tensors": (lambda: with_cache(ct("dynamic")), set(), {"tensorrt-llm"}),
    "a cache with ModelOpt's names in compressed-tensors": (
        lambda: with_cache(ct("dynamic"), "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        set(),
        {"tensorrt-llm", "transformers"},
    ),
    "a cache with a scale for each head": (
        lambda: with_cache(ct("dynamic"), strategy="attn_head"),
        set(),
        {"sglang", "tensorrt-llm"},
    ),
    "codes of eight bits in a format of weights alone": (lambda: formats("pack-quantized"), set(), {"vllm", "sglang"}),
    "a format of the config group's own": (lambda: formats("mixed-precision", "float-quantized"), set(), set()),
    "a group's format of weights alone": (
        lambda: formats("float-quantized", "pack-quantized"),
        set(),
        {"vllm", "sglang"},
    ),
    "a cache with a scale for each token": (
        lambda: with_cache(ct("dynamic"), strategy="token"),
        {"vllm"},
        {"sglang", "tensorrt-llm"},
    ),
    "a cache without scales": (
        lambda: ct("dynamic").saying(kv_cache_scheme=KV),
        set(),
        {"vllm", "sglang"},
    ),
    "a cache of ModelOpt without scales": (
        lambda: Made("modelopt", "static").saying(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
        {"transformers"},
        {"vllm", "sglang"},
    ),
    "a cache's scales beside latents": (
        lambda: with_latents(0.5),
        {"sglang"},
        {"vllm", "transformers", "tensorrt-llm"},
    ),
    "scales of 1 beside latents": (lambda: with_latents(1.0), set(), {"tensorrt-llm"}),
    "a cache's scale that BF16 does not hold": (
        lambda: unequal_cache(0.01),
        {"transformers"},
        {"vllm", "tensorrt-llm"},
    ),
    "a cache's scale that BF16 holds": (lambda: unequal_cache(0.015625), {"transformers"}, {"tensorrt-llm"}),
}


def with_latents(value):
    made = with_cache(ct("dynamic"))
    module = f"{LAYER}.self_attn.kv_a_proj_with_mqa"
    made.having(f"{module}.weight", (576, 256), torch.bfloat16).saying(ignore=[*made.quantization["ignore"], module])
    made.values = {f"{LAYER}.self_attn.{kind}_scale": value for kind in "kv"}
    return made


def unequal_cache(value):
    made = with_cache(Made("modelopt", "static"), "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
    made.values = {f"{K}.k_scale": value}
    return made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_an_engine_does_not_take_is_found_and_nothing_else(case):
    make, refusing, paying = case
    found = {name: make().check(name) for name in ENGINES}
    assert {name for name, list_ in found.items() if any(each.rule.fatal for each in list_)} == refusing, found
    costs = {name for name, list_ in found.items() if any(not each.rule.fatal for each in list_)}
    assert costs - refusing == paying - refusing, found
    assert all(each.rule.source and each.rule.text for list_ in found.values() for each in list_)


def test_what_no_scheme_of_an_engine_takes_is_said_of_this_directory_with_the_next_step():
    (finding,) = of_parts(**GROUPS).check("vllm")
    assert (
        finding.what == "compressed-tensors with FP8 weights, a scale for each group of 64 inputs, inputs as they are"
    )
    assert "of compressed-tensors it loads NVFP4, " in finding.rule.text and "`convert --to hf`" in finding.rule.text
    (finding,) = of_parts(strategy="block", block_structure=[64, 128], inputs=BY_GROUP).check("sglang")
    assert finding.what == "compressed-tensors with FP8 weights, a scale for each block of 64 x 128, inputs in FP8"


@pytest.mark.parametrize("model_type", ["nemotron_h", "lfm2_moe", "qwen3_moe"])
@pytest.mark.parametrize("method, scheme", [("fp8", "block"), ("mxfp8", "mxfp8")])
def test_experts_of_models_whose_activation_transformers_does_not_find_are_no_codes(method, scheme, model_type):
    made = Made(method, scheme, experts=True)
    for config in ({"model_type": model_type}, {"model_type": "wrapper", "text_config": {"model_type": model_type}}):
        config |= {"quantization_config": made.quantization}
        found = ENGINES["transformers"].check(config, made.specs, lambda name: torch.ones(1))
        assert ["config for hidden_act" in finding.what for finding in found] == [True] * (model_type != "qwen3_moe")


RAGGED = {  # a linear and its rows and columns, by how many GPUs; who refuses it
    "moe_intermediate_size 320 on 8": ("mlp.experts.0.gate_proj", (320, 256), 8, EVERYONE),
    "576 rows": ("self_attn.kv_a_proj_with_mqa", (576, 256), 1, {"transformers"}),
    "192 rows and two scales, which transformers takes for blocks of 96": (
        "self_attn.o_proj",
        (192, 256),
        1,
        {"transformers"},
    ),
    "inputs that no block divides": ("self_attn.o_proj", (256, 320), 1, EVERYONE),
}


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_shapes_that_blocks_do_not_divide_are_found(case):
    module, shape, ranks, refusing = case
    for name in ENGINES:
        made = Made("fp8", "block")
        made.having(f"{LAYER}.{module}.weight", shape, CODES)
        grid = tuple(-(-size // 128) for size in shape)
        made.having(f"{LAYER}.{module}.weight_scale_inv", grid)
        where = [finding.where for finding in made.check(name, ranks)]
        assert (f"{LAYER}.{module}.weight" in where) == (name in refusing)


def test_groups_of_32_need_inputs_of_32():
    made = ct("mxfp8").having(f"{Q}.weight", (256, 240), CODES).having(f"{Q}.weight_scale", (256, 8), DType.uint8)
    assert [finding.where for finding in made.check("vllm")] == [f"{Q}.weight"]


def test_patterns_that_would_take_for_ever_or_are_none_are_findings():
    slow = ct("dynamic").saying(ignore=["re:(a|aa)+$"])
    slow.having(f"{'a' * 60}b.weight", (256, 256), CODES).having(f"{'a' * 60}b.weight_scale", (256, 1))
    (finding,) = slow.check("vllm")
    assert "takes too long" in finding.what
    (finding,) = ct("dynamic").saying(ignore=["re:("]).check("vllm")
    assert "cannot be read" in finding.what


@pytest.mark.soak
def test_patterns_none_of_which_takes_long_do_not_take_long_together():
    """Each of these matches takes a tenth of a second, and there are 4,000."""
    slow = ct("dynamic").saying(ignore=[f"re:(a|aa)+{number}$" for number in range(40)])
    for number in range(100):
        slow.having(f"{'a' * 28}.x{number}.weight", (256, 256), CODES)
        slow.having(f"{'a' * 28}.x{number}.weight_scale", (256, 1))
    began = time.thread_time()
    (finding,) = slow.check("vllm")
    assert "takes too long" in finding.what and time.thread_time() - began < 8


@pytest.mark.soak
def test_many_patterns_are_matched_with_many_names():
    many = ct("dynamic").saying(ignore=[f"re:model.*{number}.nothing$" for number in range(50)])
    for number in range(1000):
        many.having(f"model.x{number}.weight", (256, 256), CODES).having(f"model.x{number}.weight_scale", (256, 1))
    assert not any("takes too long" in finding.what for finding in many.check("vllm"))


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 6 + "a" + "{1000})" * 6,
        "(" * 20 + "a" + "{1,1000})" * 20,
        "(" * 40 + "a|b" + ")+" * 40,
        "(?x)" + "(" * 3 + "a" + "{1 000})" * 3,
        "(" * 300 + "a" + ")?" * 300,
        "a|" * 300_000 + "b",
    ],
    ids=["counts", "ranges", "pluses", "blanks in counts", "depth", "length"],
)
def test_patterns_that_would_take_gigabytes_to_compile_are_findings_at_once(pattern: str):
    started = time.process_time()
    (finding,) = ct("dynamic").saying(ignore=[f"re:{pattern}"]).check("vllm")
    assert "cannot be read" in finding.what
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        (r".*\.layers\.(0|1|2|61)\.(mlp|self_attn)\.(gate|up|down|q|k|v|o)_proj$", False),
        (r"(model\.)?layers\.\d+\.(mlp\.(shared_)?experts?(\.[0-9]{1,3})?\.)+.+_proj", True),
        ("|".join(rf"model\.layers\.{layer}\.[a-z_]+\.[a-z_]+" for layer in range(20)), True),
    ],
)
def test_patterns_as_people_write_them_are_judged(pattern: str, matching: bool):
    assert BY_NAME_OR_REGEX.of([f"re:{pattern}"])("model.layers.1.mlp.experts.12.up_proj") == matching


@pytest.mark.skipif(BEFORE_5_23, reason="before transformers 5.23 an entry took longer names that start with it too")
def test_a_list_means_what_it_means_to_transformers() -> None:
    parts = ("model", "layers", "1", "11", "mlp", "experts", "gate", "gate_up_proj", "lm_head", "proj")
    draw = random.Random(0)
    modules = [".".join(draw.choices(parts, k=draw.randint(1, 5))) for _ in range(300)]
    entries = [name[draw.randrange(len(name)) :] for name in modules] + [name[: draw.randrange(9)] for name in modules]
    entries += [f"{name}.*gate" for name in modules] + [f"{name[:-1]}.?" for name in modules]
    told = []
    for entry in filter(None, entries):
        few = draw.sample(modules, 30)
        ignored = BY_START_REGEX_OR_END.of([entry])
        expected = [not should_convert_module(module, [entry]) for module in few]
        assert [ignored(module) for module in few] == expected, (entry, few)
        told += map(ignored, few)
    assert 0.02 < sum(told) / len(told) < 0.98


@pytest.mark.soak
@pytest.mark.parametrize(
    "matching", [BY_NAME, BY_PATH, BY_NAME_OR_REGEX, BY_START_REGEX_OR_END, BY_GLOB, BY_PART_OR_GLOB]
)
def test_a_list_that_names_every_expert_is_read_in_seconds(matching: Matching) -> None:
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(60) for expert in range(256)]
    started = time.process_time()
    ignored = matching.of(experts[::2])
    assert [ignored(module) for module in experts] == [True, False] * (len(experts) // 2)
    assert time.process_time() - started < 60  # one by one, some took hours


def test_verify_reads_both_of_modelopts_files(tmp_path: Path):
    pico.save(tmp_path / "source", dtype=torch.bfloat16)
    in_memory.export(
        in_memory.with_state(HuggingFaceReader(tmp_path / "source")), tmp_path / "out", "modelopt", "static"
    )
    engine = ENGINES["tensorrt-llm"]
    assert check(HuggingFaceReader(tmp_path / "out"), engine) == []
    file = tmp_path / "out" / "hf_quant_config.json"
    nested = json.loads(file.read_text())
    nested["quantization"]["exclude_modules"] = []
    file.write_text(json.dumps(nested))
    (finding,) = check(HuggingFaceReader(tmp_path / "out"), engine)
    assert finding.where == "hf_quant_config.json"


def test_older_modelopts_that_wrote_one_file_are_read_by_that(tmp_path: Path):
    pico.save(tmp_path / "source", dtype=torch.bfloat16)
    in_memory.export(
        in_memory.with_state(HuggingFaceReader(tmp_path / "source")), tmp_path / "out", "modelopt", "static"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    reader = HuggingFaceReader(tmp_path / "out")
    assert check(reader, ENGINES["vllm"]) == check(reader, ENGINES["tensorrt-llm"]) == []


def test_the_cases_begin_with_what_every_engine_takes():
    assert exported(ENGINES["vllm"], "block")[1] == Made("fp8", "block").specs


def test_the_experts_of_a_qwen3_moe_are_counted_for_older_transformers_too(tmp_path: Path):
    """transformers 5 saves `num_local_experts`, 4.57 reads `num_experts` alone, and has 128 where it is not said."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    pico.save(tmp_path / "source", "qwen3-moe", dtype=torch.bfloat16, **sizes)
    file = tmp_path / "source" / "config.json"
    saved = json.loads(file.read_text())
    saved.pop("num_experts", None)
    saved["num_local_experts"] = 8
    file.write_text(json.dumps(saved))
    execute(plan_command(Request.export(tmp_path / "source", tmp_path / "out", "tensorrt-llm", "block")))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_experts"] == 8
    assert "num_experts" in ENGINES["tensorrt-llm"].lacks(saved)


def test_a_theta_of_null_is_none_where_nothing_turns() -> None:
    """OLMo Hybrid's, as transformers saves it."""
    for theta, lacks in ((1e4, ["rope_theta"]), (None, [])):
        config = {"model_type": "olmo_hybrid", "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        assert ENGINES["tensorrt-llm"].lacks(config) == lacks


DEEPSEEK_BY_TRANSFORMERS = {"model_type": "deepseek_v3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", engines())
def test_keys_that_an_engine_requires_are_looked_for_in_a_wrappers_text_config(name: str, wrapper: str) -> None:
    engine = engine_named(name)
    alone = engine.lacks(DEEPSEEK_BY_TRANSFORMERS)
    assert engine.lacks({"model_type": wrapper, "text_config": DEEPSEEK_BY_TRANSFORMERS}) == alone
    whole = {"model_type": wrapper, "text_config": dict.fromkeys(alone, 1) | DEEPSEEK_BY_TRANSFORMERS}
    assert engine.lacks(whole) == []
    assert alone or name == "transformers"


@pytest.mark.parametrize("name", sorted(engines()))
def test_a_list_in_the_place_of_a_text_models_type_is_as_a_type_that_no_engine_knows(name: str) -> None:
    codes = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    linear = "model.layers.0.mlp.up_proj"
    specs = {
        f"{linear}.weight": TensorSpec((128, 128), CODES),
        f"{linear}.weight_scale_inv": TensorSpec((1, 1), DType.float32),
    }

    def findings(said: object) -> list[str]:
        config = {"model_type": "strange", "text_config": {"model_type": said}, "quantization_config": codes}
        return [*map(str, engine_named(name).check(config, specs, lambda scale: torch.ones(1, 1)))]

    assert findings(["llama"]) == findings("a_word")
