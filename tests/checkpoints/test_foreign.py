"""What is not read: each is told for what it is, with a step that leads on."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import repository
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter

from precisionctl.checkpoints.base import TAKE_REFERENCE
from precisionctl.checkpoints.foreign import TENSORS, UNREAD
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_files.dcp_metadata import Index, read_index, write_index
from precisionctl.cli import main
from precisionctl.cli.options import CHECKPOINT
from precisionctl.errors import MissingTensor, UnknownFormat
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.planning.make_plan import make_plan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DOCUMENT = repository.DOCS / "foreign.md"


def files(*names: str) -> Callable[[Path], object]:
    def make(directory: Path) -> None:
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("{}" if name.endswith(".json") else "")

    return make


def dcp(rename: Callable[[str], str], *, config: dict[str, str] | None = None) -> Callable[[Path], object]:
    """As PyTorch writes it, of a model whose names are changed; beside a config, if there is one."""

    def make(directory: Path) -> None:
        tensors = pico.make("llama-2").state_dict()
        state: dict[str, Any] = {rename(name): tensor for name, tensor in tensors.items()}
        torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)
        if config:
            (directory / "config.json").write_text(json.dumps(config))

    return make


def as_torchtitan(name: str) -> str:
    return name.removeprefix("model.").replace("embed_tokens", "tok_embeddings").replace("self_attn.q", "attention.w")


def as_litgpt(directory: Path) -> None:
    torch.save({"transformer.wte.weight": torch.ones(3, 4)}, directory / "lit_model.pth")
    (directory / "config.json").write_text(json.dumps({"model_type": "longcat_flash"}))


def renamed(change: Callable[[str], str], **more: torch.Tensor) -> Callable[[Path], object]:
    """A Hugging Face directory whose tensors have other names, and some more."""

    def make(directory: Path) -> None:
        pico.save(directory, "llama-2")
        tensors = load_file(directory / "model.safetensors")
        save_file({change(name): tensor for name, tensor in tensors.items()} | more, directory / "model.safetensors")

    return make


def hub_entry(main: str | None, *snapshots: str) -> Callable[[Path], object]:
    def make(directory: Path) -> None:
        files(*(f"snapshots/{snapshot}/config.json" for snapshot in snapshots))(directory)
        if main is not None:
            (directory / "refs").mkdir()
            (directory / "refs" / "main").write_text(main)

    return make


def as_paddle(directory: Path) -> None:
    pico.save(directory, "llama-2")
    path = directory / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "np"})


def as_bridges_adapter(directory: Path) -> None:
    """A `torch_dist` of adapters alone, by the names that Bridge gives them."""
    pico.save(directory / "hf", "llama-2")
    conversions.run(directory / "hf", directory / "made", "megatron")
    release = directory / "made" / "release"
    for file in release.iterdir():
        if file.is_file():
            file.rename(directory / file.name)
    index = read_index(directory)
    renamed = {key.replace("_proj.", "_proj.adapter.linear_in."): one for key, one in index.tensors.items()}
    write_index(directory, Index({key: one for key, one in renamed.items() if ".adapter." in key}, {}))


# what is there, what it is told to be, and what is said to do
MADE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an adapter": (files("adapter_config.json", "adapter_model.safetensors"), "adapter of PEFT", "--reference BASE"),
    "an adapter beside a model": (
        lambda d: (pico.save(d, "llama-2"), files("adapter_config.json")(d)),
        "adapter of PEFT",
        "--to hf --reference DIR",
    ),
    "a model with adapters in it": (
        renamed(lambda name: name.replace("q_proj.", "q_proj.base_layer.")),
        "PEFT's adapters in it",
        "merge_and_unload",
    ),
    "an adapter of Bridge": (as_bridges_adapter, "adapter of Megatron-Bridge .*without the model", "--reference BASE"),
    "an adapter of Bridge in DCP": (
        dcp(lambda name: name.replace("_proj.", "_proj.adapter.linear_in.")),
        "another container than `torch_dist`",
        "save_hf_adapter",
    ),
    "accelerate's FSDP in one file": (files("pytorch_model_fsdp.bin"), "in one file", r"pytorch_model\.bin"),
    "hqq's own file": (files("config.json", "qmodel.pt"), "hqq's own file", "save_to_safetensors.*give OUT"),
    "an optimizer in DCP": (dcp(lambda name: f"optimizer.state.{name}.exp_avg"), "without its model", "_fsdp_0"),
    "torchtitan": (
        dcp(as_torchtitan, config={"model_type": "longcat_flash"}),
        "torchtitan",
        "convert_to_hf.py .*here OUT",
    ),
    "torchtitan's Muse Glimmer": (
        dcp(
            lambda name: as_torchtitan(name).replace("tok_embeddings.", "tok_embeddings.embedding."),
            config={"model_type": "longcat_flash"},
        ),
        "torchtitan",
        "convert_to_hf.py",
    ),
    "OLMo-core": (
        dcp(lambda name: name.replace("model.norm.", "lm_head.norm."), config={"model_type": "longcat_flash"}),
        "OLMo-core",
        "convert_checkpoint_to_hf.py -i .*here -o OUT",
    ),
    "LitGPT": (as_litgpt, "LitGPT", "convert_from_litgpt .*here OUT"),
    "LitGPT's LoRA": (files("lit_model.pth.lora"), "LoRA of LitGPT", "merge_lora .*here"),
    "a model in two forms": (files("actor/x.pt", "huggingface/x.bin"), "a folder with a model", "here/actor"),
    "adapters in shards, and apart": (
        lambda d: (
            dcp(lambda name: name.replace("q_proj.", "q_proj.base_layer."))(d),
            files("lora_adapter/adapter_config.json")(d),
        ),
        "adapters in it, which are also apart",
        "here/lora_adapter, with --reference BASE",
    ),
    "PaddlePaddle": (as_paddle, "linears are transposed", "save_to_hf=True"),
    "a save without its end": (
        files("common.pt", "__0_0.distcp"),
        r"a save of Megatron or PyTorch \(DCP\) that did not finish",
        "give an earlier one",
    ),
    "a run whose only save has no end": (
        files("latest_checkpointed_iteration.txt", "iter_0000050/common.pt", "iter_0000050/__0_0.distcp"),
        r"a save of Megatron or PyTorch .* did not finish, .*iter_0000050/__0_0",
        "Copy the checkpoint again",
    ),
    "NeMo 1": (files("model.nemo"), "NeMo 1", r"here/model\.nemo"),
    "Meta's files": (files("consolidated.00.pth"), "Mistral's own files or Meta's", r"Copy params\.json"),
    "Mistral's files": (files("consolidated.safetensors"), "Mistral's own files or Meta's", r"Copy params\.json"),
    "a value head": (
        renamed(str, **{"v_head.summary.weight": torch.ones(1, 64)}),
        "head for rewards or values",
        "pretrained_model",
    ),
    "a folder of a run": (
        files("checkpoint-500/x", "checkpoint-1000/x", "runs/x"),
        "a folder with checkpoints in it",
        "here/checkpoint-1000",
    ),
    "a folder of NeMo Automodel": (
        files("LATEST/x", "epoch_0_step_900/x", "epoch_1_step_1000/x"),
        "a folder with checkpoints in it",
        "here/epoch_1_step_1000",
    ),
    "a cache": (hub_entry("0a", "0a", "ff"), "Hub's cache", ".*here/snapshots/0a"),
    "a cache without refs": (hub_entry(None, "0a", "ff"), "Hub's cache", ".*snapshots/ff"),
    "a cache whose refs lead elsewhere": (hub_entry("../..", "0a"), "Hub's cache", ".*snapshots/0a"),
    "a config alone": (files("config.json"), "config without weights", "no weights beside it"),
    "weights alone": (
        files("model.safetensors"),
        "weights without a config",
        "makes with it. Or copy config.json there",
    ),
}


def test_weights_without_a_tensor_have_no_wrapper_in_their_names(tmp_path: Path) -> None:
    pico.save(tmp_path, "llama-2")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor):
        make_plan(open_checkpoint(tmp_path), "hf")


@pytest.mark.parametrize("name", MADE)
def test_what_is_not_read_is_named_with_the_next_step(tmp_path: Path, name: str) -> None:
    make, what, do = MADE[name]
    (tmp_path / "here").mkdir()
    make(tmp_path / "here")
    with pytest.raises(UnknownFormat) as refused:
        open_checkpoint(tmp_path / "here")
    assert re.search(what, refused.value.what) and re.search(do, refused.value.do), str(refused.value)
    assert refused.value.where == str(tmp_path / "here")


def test_a_folder_with_a_config_and_no_weights_is_not_what_to_give(tmp_path: Path) -> None:
    """What verl has beside its shards."""
    files("huggingface/config.json", "huggingface/tokenizer.json")(tmp_path / "actor")
    with pytest.raises(UnknownFormat) as refused:
        open_checkpoint(tmp_path / "actor")
    assert "huggingface" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("notes.txt", "a file, and no checkpoint"),
        *((name, "one file of a checkpoint") for name in ("model.safetensors", "__0_0.distcp", ".metadata")),
    ],
)
def test_a_file_is_named_for_what_it_is(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UnknownFormat, match=what):
        open_checkpoint(tmp_path / name)


def test_a_file_in_the_current_directory_is_answered_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.bin").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownFormat, match=f"Give {tmp_path.resolve()}[.]"):
        open_checkpoint(Path("model.bin"))
    (tmp_path / "model.idx").touch()
    with pytest.raises(UnknownFormat, match="Megatron's tokenized data.*--data model`"):
        open_checkpoint(Path("model.bin"))


def test_a_file_of_fp8_state_is_named_with_the_option_that_reads_it(tmp_path: Path) -> None:
    sidecar.write(tmp_path / "m.fp8", Fp8States(DelayedScaling(), {}))
    with pytest.raises(UnknownFormat, match="FP8 state of calibrate.*this file as --fp8-state"):
        open_checkpoint(tmp_path / "m.fp8")


def test_commands_take_a_path_with_spaces(tmp_path: Path) -> None:
    files("model.nemo")(tmp_path / "my run")
    with pytest.raises(UnknownFormat, match=r"Give '\S*/my run'/model\.nemo"):
        open_checkpoint(tmp_path / "my run")


def test_every_one_is_documented_and_no_other() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    words = {"path": "DIR", "found": "FOUND"}
    assert rows[1:] == [(one.what, one.sign, one.do.format(**words)) for one in (*TENSORS, *UNREAD)]


def test_every_one_is_tried_here() -> None:
    tried = [what for _, what, _ in MADE.values()] + [
        "a file, and no checkpoint",
        "one file of a checkpoint",
        "FP8 state of calibrate",
        "Megatron's tokenized data",
        "the unfinished result of a command",  # test_convert_stopped.py
    ]
    assert [one.what for one in (*TENSORS, *UNREAD) if not any(re.search(t, one.what) for t in tried)] == []


def test_the_commands_with_a_reference_are_those_that_advice_names() -> None:
    of_checkpoints = {
        name: [option for parameter in command.params for option in parameter.opts]
        for name, command in main.commands.items()
        if any(parameter.type is CHECKPOINT for parameter in command.params if parameter.param_type_name == "argument")
    }
    having = {name for name, options in of_checkpoints.items() if "--reference" in options}
    assert having == {*re.findall("`([a-z-]+)`", TAKE_REFERENCE)} < of_checkpoints.keys()
