"""LitGPT's checkpoints are read under its names. tests/peers has LitGPT itself."""

import io
import json
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
import yaml
from safetensors.torch import load_file
from soaking import in_soak
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.hints import open_hinted
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError

NAMES = {
    "llama": (
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "norm_1"),
        ("post_attention_layernorm", "norm_2"),
        ("self_attn.o_proj", "attn.proj"),
        ("mlp.gate_proj", "mlp.fc_1"),
        ("mlp.up_proj", "mlp.fc_2"),
        ("mlp.down_proj", "mlp.proj"),
    ),
    "gpt-neox": (
        ("gpt_neox.embed_in", "transformer.wte"),
        ("gpt_neox.final_layer_norm", "transformer.ln_f"),
        ("embed_out", "lm_head"),
        ("gpt_neox.layers", "transformer.h"),
        ("input_layernorm", "norm_1"),
        ("post_attention_layernorm", "norm_2"),
        ("attention.dense", "attn.proj"),
        ("mlp.dense_h_to_4h", "mlp.fc"),
        ("mlp.dense_4h_to_h", "mlp.proj"),
    ),
}
"""From the keys of LitGPT's converters, in this order."""


def heads(tensor: Tensor) -> list[Tensor]:
    return list(tensor.split(16))


def in_litgpt(family: str, state: dict[str, Tensor], *, older: bool = False) -> dict[str, Tensor]:
    """What LitGPT has for a published model with heads of 16, before 0.5 by groups."""
    found, attention = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name, tensor in state.items():
        for hf, own in NAMES["gpt-neox" if family == "gpt-neox" else "llama"]:
            name = name.replace(hf, own)
        if match := re.fullmatch(r"(transformer\.h\.\d+)\.self_attn\.([qkv])_proj\.(\w+)", name):
            attention.setdefault(f"{match[1]}.attn.#.{match[3]}", {})[match[2]] = tensor
        elif match := re.fullmatch(
            r"(transformer\.h\.\d+)\.(?:self_attn.qkv_proj|attention.query_key_value)\.(\w+)", name
        ):
            if family == "gpt-neox":  # of each head its query, its key and its value
                parts = dict(zip("qkv", (torch.cat(heads(tensor)[kind::3]) for kind in range(3)), strict=True))
            else:
                groups = (len(heads(tensor)) - 4) // 2
                parts = dict(zip("qkv", tensor.split([64, 16 * groups, 16 * groups]), strict=True))
            attention[f"{match[1]}.attn.#.{match[2]}"] = parts
        elif match := re.fullmatch(r"(.+)\.mlp\.gate_up_proj\.weight", name):
            for own, half in zip(("fc_1", "fc_2"), tensor.chunk(2), strict=True):
                found[f"{match[1]}.mlp.{own}.weight"] = half.clone()
        else:
            found[name] = tensor
    for name, parts in attention.items():
        q, k, v = (heads(parts[kind]) for kind in "qkv")
        per = len(q) // len(k)
        groups = [[*q[at * per : (at + 1) * per], k[at], v[at]] for at in range(len(k))]
        rows = [head for group in groups for head in group] if older else [*q, *k, *v]
        found[name.replace("#", "attn" if older else "qkv")] = torch.cat(rows)
    return found


def save(directory: Path, state: dict[str, Any], **config: Any) -> Path:
    directory.mkdir()
    torch.save(state, directory / "lit_model.pth")
    (directory / "model_config.yaml").write_text(yaml.safe_dump({"name": "any"} | config))
    return directory


def published(directory: Path, family: str, **changes: Any) -> dict[str, Tensor]:
    pico.make_and_save(directory, family, **changes)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "older"),
    [("llama-3", False), ("llama-3", True), ("phi3", False), ("gpt-neox", False), *in_soak(("gpt-neox", True))],
)
def test_its_models_are_those_of_transformers(tmp_path: Path, family: str, older: bool) -> None:
    state = published(tmp_path / "hf", family)
    made = save(tmp_path / "lit", in_litgpt(family, state, older=older))
    conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == state.keys()
    assert [name for name in ours if not torch.equal(ours[name], state[name])] == []


def test_what_else_it_saves_stays_behind_and_padding_too(tmp_path: Path) -> None:
    state = published(tmp_path / "hf", "llama-3")
    stored = in_litgpt("llama-3", state)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        stored[name] = torch.cat([stored[name], torch.full((5, 64), 7.0)])
    made = save(tmp_path / "lit", {"model": stored, "iter_num": 3}, norm_eps=0.5, n_head=4)
    done = conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in state if not torch.equal(ours[name], state[name])] == []
    notes = "\n".join(done.notes)
    assert "5 rows with which LitGPT pads the vocabulary are left out." in notes
    assert "Not carried over from the run: iter_num." in notes
    assert re.search(r"the result computes otherwise: norm_eps is 0\.5 \(1e-0\d by config\.json\)", notes)


class NumbersStorages(pickle.Pickler):
    """As LitGPT's converter writes a file, one tensor after the other: storages have numbers as names."""

    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile) -> None:
        super().__init__(file, protocol=2)
        self.archive, self.written = archive, 0

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        number, data = self.written, bytes(value.untyped())
        self.archive.writestr(f"archive/data/{number}", data)
        self.written += 1
        return ("storage", torch.FloatStorage, number, "cpu", len(value))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_its_converter_writes_is_read(tmp_path: Path) -> None:
    state = published(tmp_path / "hf", "llama-3")
    made = save(tmp_path / "lit", {})
    with zipfile.ZipFile(made / "lit_model.pth", "w") as archive:
        pickled = io.BytesIO()
        NumbersStorages(pickled, archive).dump(in_litgpt("llama-3", state))
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/version", "3")
    stored = torch.load(made / "lit_model.pth")
    assert torch.equal(stored["lm_head.weight"], state["lm_head.weight"])  # torch reads it
    reader = open_hinted(made, reference=tmp_path / "hf")
    assert all(torch.equal(read_tensor(reader, name), tensor) for name, tensor in state.items())


@pytest.mark.parametrize("trained", [False, True])
def test_an_output_layer_that_was_trained_is_tied_no_longer(tmp_path: Path, trained: bool) -> None:
    state = published(tmp_path / "hf", "llama-3", tie_word_embeddings=True)
    stored = in_litgpt("llama-3", state)
    stored["lm_head.weight"] = stored["transformer.wte.weight"] + trained
    made = save(tmp_path / "lit", stored)
    done = conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "hf", verify=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in ours) == trained == any("tie_word_embeddings" in note for note in done.notes)
    if trained:
        assert torch.equal(ours["lm_head.weight"], stored["lm_head.weight"])
        assert '"tie_word_embeddings": false' in (tmp_path / "out" / "config.json").read_text()


def test_without_a_config_it_is_shown_under_its_own_names(tmp_path: Path) -> None:
    stored = in_litgpt("llama-3", published(tmp_path / "hf", "llama-3"))
    made = save(tmp_path / "lit", stored)
    assert open_checkpoint(made).specs.keys() == stored.keys()
    with pytest.raises(PrecisionctlError, match=r"does not say which model it is.*--reference"):
        conversions.run(made, tmp_path / "out", "hf")


SAID = {
    "parallel_residual": False,
    "rotary_percentage": 1.0,
    "rope_base": 500000,
    "rope_condense_ratio": 1,
    "rope_adjustments": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 32,
    },
    "n_expert_per_token": 0,
    "vocab_size": 243,
    "padded_vocab_size": 250,
}
"""What LitGPT's config says of a Llama 3.1 of these sizes; its own of Llama 3 have fewer tokens than rows, too."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"parallel_residual": True}, "parallel_residual is True .False by config"),
        ({"rotary_percentage": 0.25}, r"rotary_percentage is 0\.25 .1\.0 by config"),
        ({"rope_base": 10000}, r"rope_base is 10000 .500000\.0 by config"),
        ({"rope_adjustments": None}, "rope_adjustments: rope_type is None .'llama3' by config"),
        ({"rope_adjustments": {"factor": 8.0}}, "rope_type is 'linear' .'llama3' by config"),
        ({"rope_adjustments": None, "rope_condense_ratio": 4}, "rope_type is 'linear' .'llama3' by config"),
        (
            {"rope_adjustments": SAID["rope_adjustments"] | {"factor": 32.0}},  # type: ignore[operator]
            r"rope_adjustments: factor is 32\.0 .8\.0 by config",
        ),
        ({"rope_adjustments": [8.0]}, "its rope_adjustments are no settings"),
        ({"vocab_size": 251, "padded_vocab_size": 251}, "vocab_size is 251 .250 by config"),
    ],
)
def test_a_config_of_a_sibling_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    stored = in_litgpt("llama-3", published(tmp_path / "hf", "llama-3"))
    made, reference = save(tmp_path / "lit", stored, **SAID | changes), tmp_path / "hf"
    if not message:
        open_hinted(made, reference=reference)
        return
    with pytest.raises(PrecisionctlError, match=message):
        open_hinted(made, reference=reference)


def test_a_config_that_would_take_minutes_to_parse_is_refused(tmp_path: Path) -> None:
    made = save(tmp_path / "lit", in_litgpt("llama-3", published(tmp_path / "hf", "llama-3")), **SAID)
    with (made / "model_config.yaml").open("a") as config:
        config.write(f"# {'many words' * 10}\n" * 50_000)
    with pytest.raises(DamagedCheckpoint, match="as no such file is"):
        open_hinted(made, reference=tmp_path / "hf")


def test_a_scaling_of_a_kind_that_litgpt_lacks_is_told(tmp_path: Path) -> None:
    """As of Phi-4-mini, which LitGPT computes without the `longrope` of its config.json."""
    factors = [1.0] * 8
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    more = {"original_max_position_embeddings": 32}
    stored = in_litgpt("phi3", published(tmp_path / "hf", "phi3", rope_parameters=scaling | more, **more))
    made = save(tmp_path / "lit", stored, rope_adjustments=None)
    done = conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "hf")
    assert any("rope_adjustments: rope_type is None ('longrope' by config.json)" in note for note in done.notes)


def test_heads_without_numbers_are_refused_before_they_are_counted(tmp_path: Path) -> None:
    """A file of a few kilobytes says ten million heads."""
    heads, stored = 10**7, in_litgpt("llama-3", published(tmp_path / "hf", "llama-3"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    more = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | more))
    made = save(tmp_path / "lit", stored | {"transformer.h.0.attn.qkv.weight": torch.empty(3 * heads, 0)})
    tracemalloc.start()
    try:
        with pytest.raises(PrecisionctlError, match=r"is \[30000000, 0\], the model's sizes say \[30000000, 64\]"):
            open_hinted(made, reference=tmp_path / "hf")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"n_head": 2, "n_embd": 8}, {}, r"n_embd is 8 \(64 by config\.json\), n_head is 2 \(4"),
        (
            {},
            {"transformer.h.0.attn.qkv.weight": torch.ones(7, 64)},
            r"is \[7, 64\], the model's sizes say \[128",
        ),
        ({}, {"transformer.h.0.attn.qkv.weight": torch.ones(128, 0)}, r"is \[128, 0\], the model's sizes say"),
        ({}, {"model.norm.weight": torch.ones(64)}, r"are both `model\.norm\.weight`"),
    ],
)
def test_other_sizes_and_two_names_of_one_tensor_are_refused(
    tmp_path: Path, config: dict[str, int], more: dict[str, Tensor], message: str
) -> None:
    stored = in_litgpt("llama-3", published(tmp_path / "hf", "llama-3"))
    made = save(tmp_path / "lit", stored | more, **config)
    with pytest.raises(PrecisionctlError, match=message):
        open_hinted(made, reference=tmp_path / "hf")
