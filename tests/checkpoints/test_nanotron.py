"""nanotron's checkpoints of a Llama are read, split for ranks or not. tests/peers has nanotron itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import PrecisionctlError, UnknownArchitecture

NAMES = (
    ("model.embed_tokens", "model.token_position_embeddings.pp_block.token_embedding"),
    ("model.norm", "model.final_layer_norm.pp_block"),
    ("lm_head", "model.lm_head.pp_block"),
    ("self_attn.", "attn."),
)
"""From nanotron's examples/llama/convert_weights.py, in this order."""


def in_nanotron(state: dict[str, Tensor], *, pairs: bool) -> dict[str, list[Tensor]]:
    """What nanotron has for a Llama with heads of 16: the chunks of rows that are split for ranks, of each tensor."""
    found = dict[str, list[Tensor]]()
    for name in sorted(state, key=lambda name: ("k_proj" in name) + 2 * ("v_proj" in name)):  # queries, keys, values
        tensor = state[name]
        for hf, own in NAMES:
            name = name.replace(hf, own)
        name = re.sub(r"model\.layers\.(\d+)", r"model.decoder.\1.pp_block", name)
        if pairs and re.search(r"\.[qk]_proj\.", name):  # the halves of a head become neighbours
            tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
        found.setdefault(name, []).append(tensor)
    return found


def save(directory: Path, state: dict[str, Tensor], ranks: int, pairs: bool = False, **config: Any) -> Path:
    """As save_weights: linears and embeddings in parts, some by columns."""
    for name, chunks in in_nanotron(state, pairs=pairs).items():
        module, _, kind = name.rpartition(".")
        folder = directory.joinpath("model", *module.split("."))
        folder.mkdir(parents=True)
        whole = torch.cat(chunks)
        if "norm" in module:
            save_file({"data": whole}, folder / f"model_{kind}.safetensors", {})
            continue
        for rank in range(ranks):
            if "o_proj" in module or "down_proj" in module:
                part, width = whole.chunk(ranks, 1)[rank], whole.shape[1] // ranks
                pairs_said = f"None,None,None|None,None,None#None,None,None|{rank * width},{(rank + 1) * width},None"
            else:
                parts, said, local, first = list[Tensor](), list[str](), 0, 0
                for chunk in chunks:
                    part = chunk.chunk(ranks)[rank]
                    own, there = f"{local},{local + len(part)},None", first + rank * len(part)
                    said.append(f"{own}|None,None,None#{there},{there + len(part)},None|None,None,None")
                    parts.append(part)
                    local, first = local + len(part), first + len(chunk)
                part, pairs_said = torch.cat(parts), ";".join(said)
            shape = f"(np.int64({whole.shape[0]}), {whole.shape[1]})" if len(chunks) > 1 else str(tuple(whole.shape))
            metadata = {"version": "1.5", "unsharded_shape": shape, "local_global_slices_pairs": pairs_said}
            file = folder / f"model_{kind}_pp-rank-0-of-1_tp-rank-{rank}-of-{ranks}.safetensors"
            save_file({"data": part.contiguous()}, file, metadata)
    (directory / "model_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def published(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model's tensors, and its config as nanotron has it."""
    model = pico.make_and_save(tmp_path / "hf", "llama-2")
    config = model.config.to_dict()
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act"),
    )
    theta = {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    own = {key: config[key] for key in keys} | theta | {"is_llama_config": True, "pretraining_tp": 1}
    return load_file(tmp_path / "hf" / "model.safetensors"), own


@pytest.mark.parametrize(
    ("ranks", "said"), [(1, {"rope_interleaved": False}), (2, {"rope_interleaved": True}), (2, {})]
)
def test_its_model_is_that_of_transformers(
    tmp_path: Path, published: tuple[dict[str, Tensor], dict[str, Any]], ranks: int, said: dict[str, bool]
) -> None:
    """Before there was `rope_interleaved`, rotary pairs were neighbours."""
    state, config = published
    step = save(tmp_path / "300", state, ranks, said.get("rope_interleaved", True), **config, **said)
    assert open_checkpoint(step).iteration == 300
    done = conversions.run(step, tmp_path / "out", "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == state.keys()
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []
    assert "config.json is made of model_config.json." in done.notes
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def _of(step: Path, module: str, rank: int) -> Path:
    name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
    return step.joinpath("model", "model", *module.split("/"), name)


def _says(step: Path, file: Path, **metadata: str) -> None:
    said = {"version": "1.5", "unsharded_shape": "(64, 64)", "local_global_slices_pairs": ""} | metadata
    save_file(load_file(file), file, said)


O_PROJ = "decoder/0/pp_block/attn/o_proj"
FIRST = "None,None,None|None,None,None#None,None,None|0,32,None"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: _of(step, O_PROJ, 1).unlink(), r"o_proj\.weight` has parts of ranks \['0'\] of 2"),
        (
            lambda step: _says(step, _of(step, O_PROJ, 1), local_global_slices_pairs=FIRST),
            "do not make one tensor",
        ),
        (
            lambda step: _says(step, _of(step, O_PROJ, 1), local_global_slices_pairs=FIRST.replace("32", "99")),
            "as a slice of 64",
        ),
        (
            lambda step: _says(
                step, _of(step, O_PROJ, 1), unsharded_shape="(64, 128)", local_global_slices_pairs=FIRST
            ),
            "several shapes",
        ),
        (
            lambda step: _of(step, O_PROJ, 1).rename(_of(step, O_PROJ, 1).with_name("other.safetensors")),
            "no name that nanotron gives a file",
        ),
        (
            lambda step: (step / "model_config.json").write_text('{"is_qwen2_config": true}'),
            "no Llama",
        ),
    ],
)
def test_parts_that_are_missing_or_contradict_each_other_are_refused(
    tmp_path: Path,
    published: tuple[dict[str, Tensor], dict[str, Any]],
    change: Callable[[Path], object],
    message: str,
) -> None:
    state, config = published
    step = save(tmp_path / "300", state, 2, **config, rope_interleaved=False)
    change(step)
    with pytest.raises(PrecisionctlError, match=message):
        open_checkpoint(step)


def test_a_whole_model_with_experts_is_not_called_damaged(
    tmp_path: Path, published: tuple[dict[str, Tensor], dict[str, Any]]
) -> None:
    """The name is that of `get_exp_tp_pp_rank_and_size_from`, nanotron's serialize/utils.py."""
    state, config = published
    step = save(tmp_path / "300", state, 1, **config, rope_interleaved=False)
    experts = step / "model/model/decoder/0/pp_block/block_sparse_moe/experts/mlp/w1/module"
    experts.mkdir(parents=True)
    for rank in range(2):
        name = f"model_weight_pp-rank-0-of-1_tp-rank-0-of-1_exp-rank-{rank}-of-2.safetensors"
        save_file({"data": torch.zeros(8, 8)}, experts / name, {"version": "1.5"})
    with pytest.raises(UnknownArchitecture, match="experts, whose names are not known here") as refused:
        open_checkpoint(step)
    assert refused.value.do and "nanotron" in refused.value.do
