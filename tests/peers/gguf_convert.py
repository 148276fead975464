"""Run by llama.cpp's peer: its converter on directories without a tokenizer, one argument each, `DIR=FILE.gguf`."""

import sys
from pathlib import Path

from conversion import get_model_architecture, get_model_class
from conversion.base import ModelBase, ModelType, gguf

for argument in sys.argv[1:]:
    directory, _, file = argument.partition("=")
    settings = ModelBase.load_hparams(Path(directory), False)
    made = get_model_class(get_model_architecture(settings, ModelType.TEXT))
    made.set_vocab = lambda self: None
    made.no_mtp = not settings.get("num_nextn_predict_layers")
    made(
        Path(directory),
        gguf.LlamaFileType.ALL_F32,
        Path(file),
        eager=True,
        disable_mistral_community_chat_template=True,
    ).write()
