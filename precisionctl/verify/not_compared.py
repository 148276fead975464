"""What `verify A B` does not compare, and why: the only list of it. A report names what applies to its two checkpoints,
with the reason where it is of the model, and docs/compare.md shows all. Everything else that is stored is compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LIST: Mapping[str, str] = {
    "who wrote": "keys of config.json that say who wrote it",
    "dtypes": "the dtype to load weights in; that of each tensor is shown",
    "training": "keys of config.json that training alone uses: dropout, initial values, losses",
    "running": "keys of config.json that say how to run the model, with the same result",
    "labels": "keys of config.json for other heads than that of a language model",
    "code": "keys of config.json that name a model's own code or its files; nothing here runs code",
    "spelled otherwise": "keys of config.json that a family reads, and that make the same model: defaults, older "
    "names, what another key switches off, the longest context where rotary positions do not depend on it",
    "metadata": "metadata of two GGUF files that make the same model, as all keys of its architecture are read here",
    "config.json": "config.json, beyond the model's shape, where only one side has one",
    "quantizer": "keys of `quantization_config` that say who wrote it and how scales were found; those of "
    "compressed-tensors that are null on one side and not there on the other",
    "known method": "the `quant_method` of ModelOpt where only one side says it; `quant_algo` says it too",
    "ignored modules": "how `quantization_config` lists the modules that are not codes, where that says the same of "
    "all that are; `--target` says what an engine makes of it",
    "quantization_config": "`quantization_config`, where only one side has one, or codes, or the `quant_method` "
    "differs",
    "expert codes": "DeepSeek-V4's key of config.json for what its experts are stored as; the tensors say that",
    "former encoding": "how weights were coded before they became values, where only one side knows",
    "codes": "with --fp8: codes of weights that are stored transposed or joined otherwise, or in several formats: the "
    "values that they decode to are compared",
    "encodings of GGUF": "codes of GGUF that differ: of types that are not made here, with an importance matrix, or "
    "along another dimension than rows, codes of the other side's values are not known as such; the values that they "
    "decode to are compared",
    "derived": "buffers that a model computes by itself: rotary frequencies, causal masks",
    "towers": "towers of a wrapper beside mlx-lm's text model, or a GGUF file where no `mmproj` in its folder has them "
    "as llama.cpp does; "
    "those of two GGUF files; what of them no token is computed with, and further files of them",
    "prediction": "layers of multi-token prediction, and tensors that no token is computed with, where the other side "
    "is mlx-lm's, which has neither",
    "padding": "rows that pad the vocabulary in Megatron",
    "fixed scales": "fixed scales of inputs and caches, where nothing on the other side says what they should be; "
    "--fp8-state gives the file that does",
    "scales of values": "scales of inputs, outputs and caches beside codes that are read as values alone",
    "FP8 state": "FP8 state of one side only; --fp8 makes that a difference",
    "scales of weights": "scales and amax histories of weights, where one side is an export for Transformer Engine: it "
    "has those of the weights that are written, which `--target te` checks",
    "recording": "who recorded FP8 state, and when; statistics beside it that only one side has",
    "optimizer": "the optimizer's tensors, where only one side has them, or where they are not stored by parameter",
    "run": "what belongs to a run: its step, schedule, generators, settings of the optimizer that only one side says, "
    "that are neither AdamW's nor Muon's or that are not those of most parameters, and those of Megatron's arguments "
    "that do not describe the model",
    "files": "tokenizer, chat template and generation_config.json",
}
"""Why something is left out, by topic."""

OF_THE_MODEL = frozenset(
    {"codes", "encodings of GGUF", "towers", "prediction", "fixed scales", "scales of values", "scales of weights"}
)
"""The topics under which numbers are left out that the model computes with. The others follow from the two formats, or
are of what stands around a model."""

CONFIG_KEYS: Mapping[str, tuple[str, ...]] = {
    "who wrote": ("transformers_version", "_name_or_path", "_commit_hash"),
    "dtypes": ("dtype", "torch_dtype"),
    "training": (
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout"),
        *("initializer_range", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
        *("aux_loss_alpha", "seq_aux", "embed_dropout", "embedding_dropout", "output_dropout"),
    ),
    "running": (
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        *("_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "pretraining_tp"),
        *("ep_size", "cache_implementation"),
    ),
    "labels": (
        *("id2label", "label2id", "num_labels", "problem_type", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "task_specific_params"),
    ),
    "code": ("auto_map", "transformers_weights"),
    "expert codes": ("expert_dtype",),
}
"""Keys of config.json by the topic under which they are left out."""

QUANTIZER_KEYS = (
    *("producer", "version", "quantization_status", "global_compression_ratio", "observer", "observer_kwargs"),
    *("actorder", "sparsity_config"),
)
"""Keys anywhere in a `quantization_config` that are left out. A sparsity that does anything is refused."""


@dataclass(frozen=True)
class NotCompared:
    """`what` was not compared, for the reason that LIST has under `topic`."""

    topic: str
    what: str

    @property
    def why(self) -> str:
        return LIST[self.topic]


def of_keys(topic: str, keys: Iterable[str]) -> list[NotCompared]:
    """One line for keys that differ and are left out; none where there are no such keys."""
    named = ", ".join(dict.fromkeys(keys))
    return [NotCompared(topic, named)] if named else []
