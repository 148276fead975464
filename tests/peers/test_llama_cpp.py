"""GGUF files that are written here, judged by llama.cpp: the bytes of its converter's, and transformers' tokens and
logits."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import environments
import four_bit_directories
import gguf_tokenizers
import mxfp4_directories
import pico
import pytest
import tiny_wrappers
import torch
from gguf_files import AS_RELEASED, LLAMA3, OLMO3, WRAPPED
from gguf_tokenizers import MARKED, SIZE, TEXT
from prediction_layer import add_mtp
from repository import HELPERS
from safetensors.torch import load_file, save_file
from shared_kv import with_unused
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.export.gguf import gguf_pretokenizers as known

SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
GLM = ("[gMASK]", "<|user|>", "<|observation|>")
ALSO = {"solar-open": ("<unk>", "<|startoftext|>")}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
DEVSTRAL = pico.YARN_ROPE | {"beta_fast": 4.0, "beta_slow": 1.0}
GEMMA = {"query_pre_attn_scalar": 32}
_TOKENIZERS = {
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-small"), "sentencepiece of gemma4"),
    "gemma3n": "sentencepiece of gemma",
    **dict.fromkeys(("ernie4-5", "ernie4-5-moe", "nemotron", "minicpm3"), "sentencepiece"),
    **dict.fromkeys(("llama4", "lfm2", "lfm2-moe", "nemotron-nas"), "llama-bpe"),
    **dict.fromkeys(("deepseek-v3.2", "glm-moe-dsa"), "deepseek-v3"),
    **dict.fromkeys(("cohere", "cohere2", "starcoder2"), "smollm"),
    "seed-oss": "seed-coder",
    "ling-2": "bailingmoe",
    "exaone-moe": "exaone-moe",
    "jais2": "jais-2",
    "cohere2-moe": "tiny_aya",
    "arcee": "minicpm5",
    "bloom": "bloom",
    "olmo": "deepseek-coder",
    "falcon": "falcon",
    "kimi-linear": "kimi-k2",
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama-3": ({"rope_parameters": LLAMA3}, "llama-bpe"),
    "llama-tied": ({}, "sentencepiece"),
    "mistral": ({"sliding_window": None}, "tekken"),
    "mixtral": ({"sliding_window": None}, "sentencepiece"),
    "granite": ({}, "smollm"),
    "qwen2": ({}, "qwen2"),
    "qwen2-moe": (SPARSE | {"norm_topk_prob": False}, "qwen2"),
    "qwen3": ({}, "qwen2"),
    "qwen3-moe": (SPARSE | {"norm_topk_prob": True}, "qwen35"),
    "gemma": ({}, "sentencepiece of gemma"),
    "gemma2": (GEMMA, "sentencepiece of gemma"),
    "gemma3": (GEMMA, "sentencepiece of gemma"),
    "gpt-oss": ({"swiglu_limit": 7.0}, "gpt-4o"),
    "gpt-oss as published": ({}, "gpt-4o"),
    "granite-moe": ({}, "smollm"),
    "smollm3": ({}, "llama-bpe"),
    "phi3": ({"original_max_position_embeddings": 128}, "gpt-4o"),
    "phi3-long": ({"sliding_window": None}, "gpt-4o"),
    "olmo2": ({}, "qwen2"),
    "olmo3": (OLMO3, "qwen2"),
    "deepseek-v2": ({"q_lora_rank": 24, "scoring_func": "softmax", "n_group": 1, "topk_group": 1}, "qwen2"),
    "deepseek-v3": (
        {"scoring_func": "sigmoid", "rope_parameters": pico.YARN_ROPE | BETAS | {"mscale": 0.8, "mscale_all_dim": 0.8}},
        "qwen2",
    ),
    "deepseek-v3 as Kimi K2": (
        {
            "scoring_func": "sigmoid",
            "rope_parameters": pico.YARN_ROPE
            | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "kimi-k2",
    ),
    "glm4-moe": ({}, "smaug-bpe"),
    "qwen3-next": (SPARSE | {"linear_value_head_dim": 16}, "qwen2"),
    "ministral3 as Devstral 2": (
        {"rope_parameters": DEVSTRAL | {"mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}},
        "qwen35",
    ),
    **{family: (changes, _TOKENIZERS.get(family, "qwen35")) for family, changes in (AS_RELEASED | WRAPPED).items()},
    # of deviations from a mean it takes one channel less, which many channels hardly show
    "gemma3n": (AS_RELEASED["gemma3n"] | {"intermediate_size": [4096] * 20}, "sentencepiece of gemma"),
    "llama-3 modelopt-nvfp4a16": ({}, "llama-bpe"),
    "llama-3 ct-nvfp4a16": ({}, "llama-bpe"),
    "qwen3 ct-nvfp4": ({}, "qwen2"),
    "qwen3-moe modelopt-nvfp4": (SPARSE | {"norm_topk_prob": True, "moe_intermediate_size": 64}, "qwen2"),
    "qwen3-next ct-nvfp4": (
        SPARSE | {"linear_value_head_dim": 16, "moe_intermediate_size": 64, "num_hidden_layers": 4},
        "qwen2",
    ),
}
BYTE_LEVEL = {
    "llama-bpe": ((known.LLAMA3,), True, True),
    "tekken": ((known.TEKKEN,), True, True),
    "smollm": ((known.DIGITS, known.GPT2), False, False),
    "qwen2": ((known.QWEN2,), False, False),
    "qwen35": ((known.QWEN35,), False, False),
    "gpt-4o": ((known.GPT4O,), False, False),
    "kimi-k2": ((known.KIMI_K2,), False, False),
    "smaug-bpe": ((known.LLAMA3,), False, False),
    "deepseek-v3": (known.DEEPSEEK3, False, False),
    "seed-coder": ((known.SEED,), False, False),
    "bailingmoe": ((known.BAILING,), False, False),
    "exaone-moe": ((known.EXAONE_MOE,), False, False),
    "jais-2": ((known.JAIS2,), False, False),
    "tiny_aya": (known.TINY_AYA, False, False),
    "minicpm5": (known.MINICPM5, True, False),
    "bloom": ((known.BLOOM,), False, False),
    "deepseek-coder": (known.DEEPSEEK_CODER, False, False),
    "falcon": (gguf_tokenizers.OF_FALCON, False, False),
}
SIZES = {
    **dict.fromkeys(("mamba2", "mamba", "falcon-mamba"), 336),
    "nemotron-nas": 128256,  # by which the converter knows the kind of tokenizer
    **dict.fromkeys(("nemotron-h", "granite-hybrid", "granite-hybrid-dense"), 344),
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-small"), SIZE - 10),
}
"""Of vocabularies: the converter makes those beside mixers a multiple of 8, or 16, and cuts Gemma 4's to its tokens."""
OTHERWISE = {
    "sentencepiece": {"tokenizer.ggml.scores", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"},
    "sentencepiece of gemma": {"tokenizer.ggml.scores", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"},
}
"""Of a SentencePiece model whose only file is a tokenizer.json, the converter writes equal scores for all tokens, and
none for those that only the embedding has."""
SAID_OTHERWISE = {
    # it says the epsilon of the other norms too, which config.json has beside the model's
    "cohere2-moe": {"cohere2moe.attention.layer_norm_epsilon"},
    "hunyuan": {"tokenizer.ggml.eos_token_id"},  # it says the id that config.json has as eod_token_id
    "nemotron": {"tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id"},  # it says those of the release
    "glm": {"chatglm.attention.layer_norm_rms_epsilon", "chatglm.context_length"},  # which it looks for by older names
    **dict.fromkeys(("gpt-neox", "mpt"), {"general.file_type"}),  # which it leaves out
    # which it leaves out, and llama.cpp reads
    "mistral4": {"mistral4.attention.temperature_scale", "mistral4.attention.temperature_length"},
}
"""Metadata of single families."""
PEAKED = {
    "mpt",  # whose GELU llama.cpp approximates
    *("mamba2", "mamba", "falcon-mamba"),  # all of whose layers have states
    "gemma3n",  # which has 20 layers
    "afmoe",
    "exaone4",
    "exaone-moe",
    "olmo3",
    "gemma4",
    "gemma4-moe",
    "gemma4-small",
    "qwen2_5_vl",
    "glm4v",
    "qwen3-next ct-nvfp4",
}
"""Whose norms of queries and keys, made larger, or whose width or random codes let a token attend to few others: FP16
shows more."""
IN_NVFP4 = {family for family in CASES if "nvfp4" in family}
SEVERAL = {
    **dict.fromkeys(IN_NVFP4, ("nvfp4",)),
    **dict.fromkeys(("llama-3", "qwen3-moe", "gpt-oss"), ("bf16", "f16", "q8_0")),
    "falcon-h1": ("bf16", "f16"),
    "gemma3n": ("f16",),  # inputs of matrices in BF16 are rounded so, in 20 layers
    "gpt-oss as published": ("mxfp4",),
}


def save(folder: Path, family: str) -> Path:
    changes, tokenizer = CASES[family]
    if family == "gpt-oss as published":
        folder.parent.mkdir()
        mxfp4_directories.make(folder, config={**mxfp4_directories.CONFIG, "vocab_size": SIZE})
    elif family in IN_NVFP4:
        save_codes(folder, *family.split(), changes)
    elif family in WRAPPED:
        tiny_wrappers.save(folder, family, vocab_size=SIZE, dtype=torch.bfloat16, **changes)
        sharpen(folder)
    else:
        size = SIZES.get(family, SIZE)
        pico.save(folder, family.partition(" ")[0], vocab_size=size, dtype=torch.bfloat16, **changes)
        if family == "gemma4-small":
            with_unused(folder, 3)
        sharpen(folder)
    if tokenizer in BYTE_LEVEL:
        expressions, ignores, begins = BYTE_LEVEL[tokenizer]
        made = gguf_tokenizers.byte_level(
            *expressions,
            ignore_merges=ignores,
            begins=begins,
            also=GLM if family.startswith("glm") else ALSO.get(family, ()),
        )
    else:
        made = gguf_tokenizers.sentencepiece(prefix=tokenizer == "sentencepiece")
    made.save_pretrained(folder)
    if family in ("glm4-moe", "hy-v3", "glm-moe-dsa", "deepseek-v3.2", "qwen3-next", "ling-3", "step3p5"):
        add_mtp(folder, torch.bfloat16)
    return folder


def save_codes(folder: Path, family: str, spelling: str, changes: dict[str, Any]) -> None:
    """A model whose linears are codes, but for delta nets, whose fused tensors the converter keeps as codes that
    llama.cpp multiplies by no scale. Beside it are the values of these, which transformers computes with."""
    options = {"vocab_size": SIZE, "quantized": lambda name: "linear_attn" not in name, **changes}
    values = four_bit_directories.make(folder, spelling, family, **options)
    decoded = shutil.copytree(folder, folder.with_name("Values"))
    (decoded / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "quantization_config": None})
    )
    stored = load_file(folder / "model.safetensors")
    modules = tuple(name.removesuffix("weight") for name in values)
    save_file({n: t for n, t in stored.items() if not n.startswith(modules)} | values, decoded / "model.safetensors")


_SHARPER = {
    re.compile(r"\b(q|k|q_a|q_b|kv_a|kv_b|qkv)_proj|indexer\.w(q_b|k)\."): 6,
    re.compile(r"\b(q|k)_norm\.|\b(query|key)_layernorm\."): 2,
}


def sharpen(folder: Path) -> None:
    """Make queries and keys larger. As initialized, a token attends to all alike, and positions hardly matter."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            for pattern, times in _SHARPER.items():
                if pattern.search(name) and name.endswith("weight"):
                    tensors[name] *= times
        save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("judged")
    cases = []
    for family, (_, tokenizer) in CASES.items():
        published = save(folder / family / "Model", family)
        for kind in SEVERAL.get(family, ("bf16",)):
            execute(plan_command(Request.export(published, folder / family / kind / "Model", LLAMA_CPP, kind)))
            file = f"{family}/{kind}/Model/Model-{kind.upper()}.gguf"
            theirs = "bf16" if kind in ("mxfp4", "nvfp4") else kind  # the codes that are there stay what they are
            cases.append((f"{family}/Model", file, theirs, tokenizer))
    python, sources = environments.llama_cpp()
    here = Path(__file__).parent
    found = os.pathsep.join(map(str, (sources, sources / "gguf-py", HELPERS)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    command = [python, here / "llama_cpp_judges.py", folder, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder, json.loads((folder / "answers.json").read_text())


def test_files_are_byte_for_byte_what_the_converter_writes_but_for_what_is_stated(judged: Any) -> None:
    _, answers = judged
    for file, found in answers["files"].items():
        family = file.partition("/")[0]
        otherwise = OTHERWISE.get(CASES[family][1], set()) | SAID_OTHERWISE.get(family, set())
        if family in ("gemma", "gemma2", "gemma3"):
            otherwise = otherwise | {"tokenizer.ggml.eot_token_id"}
        if family.endswith("ct-nvfp4a16"):  # it says of ModelOpt's alone that inputs stay as they are
            otherwise = {"general.tensor_extra.name", "general.tensor_extra.prec_a4"}
        tensors = set()
        if family == "gemma3n":  # whose embeddings for layers it fills up with zeros
            tensors, otherwise = {"per_layer_token_embd.weight"}, otherwise | {"tokenizer.ggml.add_space_prefix"}
        if family == "gemma3":  # it cuts off rows of the embedding for which the tokenizer has no token
            tensors, otherwise = (
                {"token_embd.weight"},
                otherwise | {"general.size_label", "tokenizer.ggml.add_space_prefix"},
            )
        assert {*found["metadata"]} <= otherwise and {*found["tensors"]} <= tensors, (file, found)
        assert found["bytes"] or otherwise or family in ("phi3-long", "phi"), file  # of which one key stands elsewhere


def test_llama_cpp_makes_the_tokens_that_transformers_makes(judged: Any) -> None:
    folder, answers = judged
    for file, found in answers["files"].items():
        tokenizer = AutoTokenizer.from_pretrained(folder / file.partition("/")[0] / "Model")
        assert found["tokens"][TEXT] == tokenizer(TEXT)["input_ids"], file
        apart = CASES[file.partition("/")[0]][1] in known.MARKS_APART
        assert (found["tokens"][MARKED] == tokenizer(MARKED)["input_ids"]) != apart, file


def test_llama_cpp_computes_the_logits_that_transformers_computes(judged: Any) -> None:
    folder, answers = judged
    for file in answers["files"]:
        family = file.partition("/")[0]
        kind = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
        published = folder / family / ("Values" if family in IN_NVFP4 else "Model")
        model = kind.from_pretrained(published, dtype=torch.float32)
        with torch.no_grad():
            expected = model(torch.tensor([answers["ids"]])).logits[0].log_softmax(-1)
        found = load_file((folder / file).with_suffix(".safetensors"))["logits"].log_softmax(-1)
        kl = (expected.exp() * (expected - found)).sum(-1)
        times, most = 10 if "q8_0" in file or family in IN_NVFP4 else 1, 2e-5 if family in PEAKED else 2e-6
        # in FP16, which llama.cpp keeps keys in, a token may choose another of two experts that are worth the same
        assert kl.mean() < times * 1e-4 and kl.median() < times * most, (file, kl)
