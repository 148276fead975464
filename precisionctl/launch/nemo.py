"""NeMo 2: its own directories are gone on from, Hugging Face's imported first (nemo.lightning, nemo.collections)."""

from precisionctl.checkpoints.megatron.arguments import recipe_words
from precisionctl.checkpoints.megatron.provider import NEMO
from precisionctl.errors import CheckpointError
from precisionctl.launch.base import Launch, LaunchSource


def launch(subject: LaunchSource) -> Launch:
    """Raises CheckpointError for Megatron's other directories, which NeMo 2 cannot open."""
    its_own = subject.path / NEMO
    lines = ["from nemo import lightning as nl"]
    if its_own.is_file():
        restored = str(subject.path.absolute())
    elif subject.reader.layout == "hf":
        restored = str(subject.directory) + "-nemo"
        lines += [
            "from nemo.collections import llm",
            f"llm.import_ckpt(model=MODEL, source={'hf://' + str(subject.directory)!r}, output_path={restored!r})",
        ]
    else:
        raise CheckpointError(
            "NeMo 2 opens only Megatron directories that it wrote itself",
            where=subject.path,
            do="Give it a Hugging Face directory (`convert --to hf`), or use its successor: "
            "--framework megatron-bridge.",
        )
    lines.append(f"resume = nl.AutoResume(restore_config=nl.RestoreConfig(path={restored!r}, load_optim_state=False))")
    words = {"precision": "bf16-mixed", **(recipe_words(subject.state) if subject.state else {})}
    lines.append(
        f"plugin = nl.MegatronMixedPrecision({', '.join(f'{name}={value!r}' for name, value in words.items())})"
    )
    state = ("amax histories stay behind: NeMo's import takes weights alone",) if subject.state else ()
    model = ("MODEL, the llm class of the family",) if not its_own.is_file() else ()
    yours = (*model, "nl.Trainer with this plugin", "data", "llm.finetune or llm.pretrain with this resume")
    return Launch("nemo", environment=subject.environment, config="\n".join(lines), yours=yours, notes=state)
