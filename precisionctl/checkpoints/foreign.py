"""Formats that are not read here: how each is recognised, and what the user can do about it (docs/foreign.md).

They are recognised by file names, config.json and names of tensors; nothing is unpickled.
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precisionctl.architectures.read_off import HEAD_OF_NUMBERS
from precisionctl.checkpoints.base import WITH_REFERENCE, Reader
from precisionctl.checkpoints.hf_directory.safetensors_file import read_described
from precisionctl.checkpoints.other_trainers import litgpt_families
from precisionctl.checkpoints.other_trainers.olmo_core_families import LAST_NORM
from precisionctl.checkpoints.other_trainers.torchtitan_families import EMBEDDINGS
from precisionctl.checkpoints.other_trainers.trainer_directory import says_its_model
from precisionctl.checkpoints.other_trainers.trainer_trees import number_of_step
from precisionctl.checkpoints.output import GOES_ON, UNFINISHED, is_unfinished
from precisionctl.checkpoints.torch_files import dcp_metadata
from precisionctl.errors import DamagedCheckpoint, UnknownFormat
from precisionctl.fp8 import sidecar
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.untrusted.safe_files import read_file


@dataclass(frozen=True)
class Foreign:
    """A format that is not read here: `what` it is, the `sign` by which it is recognised (in words, for the docs), and
    what the user can `do`.

    `find` takes a path or an open Reader and returns the sign as found there (a name, perhaps empty), or None if it is
    something else. `do` may contain `{path}` and `{found}`; if it lacks `{found}`, that is shown after `what`.
    """

    what: str
    sign: str
    do: str
    find: Callable[[Any], str | None]

    def check(self, subject: Any, path: Path) -> None:
        """Raise UnknownFormat if `subject` is in this format."""
        found = self.find(subject)
        if found is None:
            return
        beside = f" ({found})" if found and "{found}" not in self.do else ""
        do = self.do.format(path=shlex.quote(str(path)), found=found)
        raise UnknownFormat(self.what + beside, where=path, do=do)


_THEN = "copy config.json and the tokenizer's files to OUT, and give OUT"


def _has(*patterns: str) -> Callable[[Path], str | None]:
    """A `find` for the first file of a directory with one of these names, or for a path that is such a file."""

    def find(path: Path) -> str | None:
        if path.is_file():
            return "" if any(path.match(pattern) for pattern in patterns) else None
        found = (one for pattern in patterns for one in sorted(path.glob(pattern)))
        return next((shlex.quote(str(one.relative_to(path))) for one in found), None)

    return find


def _unfinished_save(path: Path) -> str | None:
    return _has("*.distcp", "iter_*/*.distcp")(path) if path.is_dir() else None  # with an index a container reads it


def _without_params(path: Path) -> str | None:
    there = path.is_dir() and (path / "params.json").exists()
    return None if there else _has("consolidated*.safetensors", "consolidated.*.pth")(path)


def _newest_step(path: Path) -> str | None:
    steps = [(step, one) for one in _directories(path) if (step := number_of_step(one.name)) is not None]
    return shlex.quote(max(steps)[1].name) if steps else None


def _directories(path: Path) -> list[Path]:
    return [one for one in path.iterdir() if one.is_dir()] if path.is_dir() else []


_MODELS = (
    *("actor", "_actor", "policy", "trainer", "model", "modeling", "huggingface", "hf", "final", "weights"),
    *("recover_checkpoint", "checkpoint", "checkpoints"),
)


def _model_inside(path: Path) -> str | None:
    """A directory with the name of a model's, and more in it than a config and a tokenizer."""
    inside = {one.name for one in _directories(path) if _directories(one) or any(map(_is_weights, one.iterdir()))}
    return next((name for name in _MODELS if name in inside), None)


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".distcp", ".pt") or path.name == dcp_metadata.FILE


def _snapshot(path: Path) -> str | None:
    """The name of a snapshot in an entry of the Hub's cache: that of `refs/main`, else any that is there."""
    there = [config.parent.name for config in sorted(path.glob("snapshots/*/config.json"))]
    if not there:
        return None
    try:
        main = read_file(path / "refs" / "main", path, most=1 << 10).decode(errors="replace").strip()
    except (OSError, DamagedCheckpoint):
        main = ""
    return shlex.quote(main if main in there else there[-1])


def _indexed_data(path: Path) -> str | None:
    """The prefix of Megatron's data that a path is a file of."""
    there = path.suffix in (".bin", ".idx") and all(path.with_suffix(end).is_file() for end in (".bin", ".idx"))
    return shlex.quote(str(path.with_suffix(""))) if there else None


def _first(names: Iterable[str], found: Callable[[str], object]) -> str | None:
    return next((name[:90] for name in names if found(name)), None)


def _of_a_family(reader: Reader) -> bool:
    """Whether it is a Hugging Face directory of a family with a table, which such tensors have no place in; towers may
    have any."""
    if reader.layout != "hf" or not says_its_model(reader):
        return False
    return not isinstance(reader.model, UntabledModel) and reader.model.wrapper is None


_LORA_APART = "lora_adapter"
"""Where verl, EasyR1 and SkyRL save LoRA beside their shards."""


def _with_adapters(reader: Reader) -> str | None:
    return _first(reader.specs, lambda name: ".base_layer." in name or ".lora_A." in name)


def _saved_by_numpy(reader: Reader) -> str | None:
    """The first file, if its metadata says so. transformers, whose own say `pt`, does not read such files either."""
    first = next((file for file in reader.files if file.suffix == ".safetensors"), None)
    return first.name if first and read_described(first)[1].get("format") == "np" else None


def _is_dcp(reader: Reader) -> bool:
    return reader.container == "dcp"


TENSORS = (
    Foreign(
        "a checkpoint of torchtitan, of a model whose names are not known (docs/trainers.md has those that are)",
        f"`{dcp_metadata.FILE}`, and a tensor `tok_embeddings.weight`",
        "In a clone of torchtitan: `python scripts/checkpoint_conversion/convert_to_hf.py {path} OUT --hf_assets_path "
        f"HF_DIR --model_name qwen3_5 --model_flavor 4B`, with your model's name; {_THEN}.",
        lambda reader: (
            _first(reader.specs, EMBEDDINGS.__contains__) if _is_dcp(reader) and says_its_model(reader) else None
        ),
    ),
    Foreign(
        "a checkpoint of OLMo-core, of a model whose names are not known (docs/trainers.md has those that are)",
        f"`{dcp_metadata.FILE}`, and a tensor `{LAST_NORM}`",
        "In a clone of OLMo-core: `python src/examples/huggingface/convert_checkpoint_to_hf.py -i {path} -o OUT`; then "
        "give OUT.",
        lambda reader: "" if _is_dcp(reader) and says_its_model(reader) and LAST_NORM in reader.specs else None,
    ),
    Foreign(
        "a checkpoint of LitGPT, of a model whose names are not known (docs/trainers.md has those that are)",
        "`lit_model.pth`, and a tensor `transformer.wte.weight`",
        "Convert it with LitGPT: `litgpt convert_from_litgpt {path} OUT`, and rename OUT/model.pth to "
        f"pytorch_model.bin; {_THEN}.",
        lambda reader: (
            ""
            if reader.container == "litgpt" and says_its_model(reader) and litgpt_families.EMBEDDINGS in reader.specs
            else None
        ),
    ),
    Foreign(
        "the optimizer of a PyTorch checkpoint (DCP), without its model",
        f"`{dcp_metadata.FILE}`, and tensors of an optimizer alone",
        "Its model is in another directory, accelerate's in `pytorch_model_fsdp_0` beside it: give that.",
        lambda reader: "" if _is_dcp(reader) and not reader.specs else None,
    ),
    Foreign(
        "a language model with a head for rewards or values beside its own",
        "a tensor such as `v_head.summary.weight` or `score.weight`, and a class for text in config.json",
        "No class of transformers or of an engine loads both. Of TRL's value heads, save the model inside: "
        '`model.pretrained_model.save_pretrained("OUT")`; of a reward model let `architectures` in config.json name '
        "its class, such as LlamaForSequenceClassification.",
        lambda reader: _first(reader.specs, HEAD_OF_NUMBERS.fullmatch) if _of_a_family(reader) else None,
    ),
    Foreign(
        "weights in PaddlePaddle's form, in which linears are transposed",
        "`format: np` in the metadata of `*.safetensors`",
        "Save it in PyTorch's form: in PaddleFormers `model.save_pretrained(OUT, save_to_hf=True)`.",
        _saved_by_numpy,
    ),
    Foreign(
        "a model with PEFT's adapters in it, which are also apart",
        "a tensor such as `….q_proj.base_layer.weight` or `….lora_A.default.weight`, and a directory `lora_adapter`",
        "Give {path}/{found}, with --reference BASE: the model that they are merged into.",
        lambda reader: _LORA_APART if _with_adapters(reader) and (reader.path / _LORA_APART).is_dir() else None,
    ),
    Foreign(
        "a model with PEFT's adapters in it",
        "a tensor such as `….q_proj.base_layer.weight` or `….lora_A.default.weight`",
        'Merge them and save again: `model.merge_and_unload().save_pretrained("OUT")`.',
        _with_adapters,
    ),
    Foreign(
        "an adapter of Megatron-Bridge in another container than `torch_dist`",
        "a tensor such as `….linear_qkv.adapter.linear_in.weight`",
        "In the run, save it as PEFT's: `AutoBridge.save_hf_adapter(model, ADAPTER, peft_config=peft)`; then "
        "`precisionctl convert ADAPTER OUT --to hf --reference BASE`.",
        lambda reader: _first(reader.specs, lambda name: ".adapter.linear_" in name),
    ),
)
"""Formats that a Reader opens, and that are recognised by the names of their tensors."""

UNREAD = (
    Foreign(
        UNFINISHED,
        "`.unfinished` in a directory `*.partial`",
        GOES_ON,
        lambda path: "" if is_unfinished(path) else None,
    ),
    Foreign(
        "a save of Megatron or PyTorch (DCP) that did not finish, or was copied in part",
        "`*.distcp`, there or in `iter_*`, and no `.metadata`",
        "`.metadata` and `metadata.json` are written last. Copy the checkpoint again, or give an earlier one.",
        _unfinished_save,
    ),
    Foreign(
        "a folder with an archive of NeMo 1 in it",
        "`*.nemo`",
        "Give {path}/{found}.",
        _has("*.nemo"),
    ),
    Foreign(
        "LoRA of LitGPT, without the model that it is merged into",
        "`lit_model.pth.lora`",
        "Merge it: `litgpt merge_lora {path}`, which writes lit_model.pth beside it; then give {path}.",
        _has("lit_model.pth.lora"),
    ),
    Foreign(
        "weights in Mistral's own files or Meta's, without their params.json",
        "`consolidated*.safetensors` or `consolidated.*.pth`",
        "Copy params.json of the same release beside them.",
        _without_params,
    ),
    Foreign(
        "a model in hqq's own file",
        "`qmodel.pt`",
        'In hqq: `AutoHQQHFModel.save_to_safetensors(AutoHQQHFModel.from_quantized("{path}"), "OUT")`; '
        "copy the tokenizer's files to OUT, and give OUT.",
        _has("qmodel.pt"),
    ),
    Foreign(
        "all weights of an accelerate run in one file",
        "`pytorch_model_fsdp.bin`",
        "Copy it as pytorch_model.bin into a directory with config.json and the tokenizer's files, and give that.",
        _has("pytorch_model_fsdp.bin"),
    ),
    Foreign(
        "an entry of the Hub's cache",
        "`snapshots/*/config.json`",
        "Give {path}/snapshots/{found}.",
        _snapshot,
    ),
    Foreign(
        "a folder with checkpoints in it",
        "directories such as `checkpoint-500`, `step-100`, `global_step_10` or `epoch_0_step_10`",
        "Give one of them, the newest for instance: {path}/{found}.",
        _newest_step,
    ),
    Foreign(
        "a folder with a model in it",
        f"a directory {', '.join(f'`{name}`' for name in _MODELS[:-1])} or `{_MODELS[-1]}`",
        "Give {path}/{found}.",
        _model_inside,
    ),
    Foreign(
        "FP8 state of calibrate or a recorder, and no checkpoint",
        "a file with `precisionctl` in the metadata of safetensors",
        "Give the checkpoint that it was recorded with, and this file as --fp8-state. `inspect FILE` shows it.",
        lambda path: "" if sidecar.is_sidecar(path) else None,
    ),
    Foreign(
        "Megatron's tokenized data, and no checkpoint",
        "a file `*.bin` or `*.idx` with the other one beside it",
        "Commands that take data take it as `--data {found}`.",
        _indexed_data,
    ),
    Foreign(
        "one file of a checkpoint, which is a directory",
        "a file `*.safetensors`, `*.bin`, `*.distcp`, `*.pt` or `.metadata`",
        "Give {found}.",
        lambda path: shlex.quote(str(path.parent.resolve())) if path.is_file() and _is_weights(path) else None,
    ),
    Foreign(
        "a file, and no checkpoint",
        "it is no directory",
        "Give the directory of the model, or a `*.nemo`.",
        lambda path: "" if path.is_file() else None,
    ),
    Foreign(
        "a config without weights",
        "config.json alone",
        "There is a config.json, and no weights beside it: they are *.safetensors, or pytorch_model.bin or its parts "
        "with their index. Other formats (TensorFlow, Flax, ONNX) are not read.",
        lambda path: "" if (path / "config.json").is_file() else None,
    ),
    Foreign(
        "weights without a config",
        "`*.safetensors` or `*.bin` without config.json",
        f"There are weights, and no config.json beside them. {WITH_REFERENCE} Or copy config.json there.",
        _has("*.safetensors", "*.bin"),
    ),
)
"""Formats that no Reader recognises. The first that fits is reported, so the general ones are last."""
