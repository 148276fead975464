"""NeMo 2: it continues from directories that it wrote, and imports Hugging Face's first (nemo.lightning,
nemo.collections)."""

from collections.abc import Mapping

from precisionctl.checkpoints.megatron.provider import NEMO
from precisionctl.errors import CheckpointError
from precisionctl.launch.base import Launch, LaunchSource

_IMPORTED: Mapping[str, str] = {
    "deepseek_v2": "DeepSeekModel",
    "deepseek_v3": "DeepSeekModel",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "gemma3_text": "Gemma3Model",
    "gpt_bigcode": "StarcoderModel",
    "gpt_oss": "GPTOSSModel",
    "llama": "LlamaModel",
    "llama4": "LlamaModel",
    "mistral": "MistralModel",
    "mixtral": "MixtralModel",
    "nemotron": "NemotronModel",
    "nemotron_h": "MambaModel",
    "phi3": "Phi3Model",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "qwen3_moe": "Qwen3Model",
    "starcoder2": "Starcoder2Model",
}
"""The class of `nemo.collections.llm` that imports each family from Hugging Face, in NeMo 2.7.3
(`io.model_importer(..., "hf")`, collections/llm/gpt/model)."""


def launch(source: LaunchSource) -> Launch:
    """The lines of a script. Raises CheckpointError for other checkpoints, which NeMo 2 cannot open, and
    PrecisionError as `require_fp8_sizes`."""
    its_own = source.path / NEMO
    lines = ["from nemo import lightning as nl"]
    model: tuple[str, ...] = ()
    if its_own.is_file():
        restored = str(source.path.absolute())
    elif source.is_hugging_face:
        family = source.reader.model.model_type
        if family not in _IMPORTED:
            raise CheckpointError(
                f"NeMo 2 imports no {family}",
                where=source.path,
                do=f"It imports {', '.join(_IMPORTED)}. Others: `convert --to megatron`, and --framework "
                "megatron-bridge.",
            )
        model = (f"MODEL, an llm.{_IMPORTED[family]} with the config of its size",)
        restored = str(source.directory) + "-nemo"
        lines += [
            "from nemo.collections import llm",
            f"llm.import_ckpt(model=MODEL, source={'hf://' + str(source.directory)!r}, output_path={restored!r})",
        ]
    else:
        raise CheckpointError(
            "NeMo 2 opens directories that it wrote itself and Hugging Face directories, and this is neither",
            where=source.path,
            do="Give it a Hugging Face directory (`convert --to hf`), or use its successor: "
            "--framework megatron-bridge.",
        )
    lines.append(f"resume = nl.AutoResume(restore_config=nl.RestoreConfig(path={restored!r}, load_optim_state=False))")
    source.require_fp8_sizes("NeMo")
    words = {"precision": "bf16-mixed", **source.fp8_words}
    lines.append(
        f"plugin = nl.MegatronMixedPrecision({', '.join(f'{name}={value!r}' for name, value in words.items())})"
    )
    stays = ["amax histories stay behind: NeMo's import takes weights alone"] if source.state else []
    notes = (*stays, *source.fp8_notes(source.gemms))
    yours = (*model, "nl.Trainer with this plugin", "data", "llm.finetune or llm.pretrain with this resume")
    return Launch("nemo", environment=source.environment, config="\n".join(lines), yours=yours, notes=notes)
