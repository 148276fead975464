"""Converts a model as `mlx_lm.convert` does, without a tokenizer, and loads another directory. Arguments: the source,
the result, a directory of ours, a file for both's logits, and as JSON the tokens and keywords of `quantize_model`; null
for values."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model


def main(source: Path, result: Path, ours: Path, logits: Path, said: list[int], how: dict[str, object] | None) -> None:
    model, config = load_model(source)
    casts = getattr(model, "cast_predicate", lambda name: True)

    def in_bf16(name: str, each: mx.array) -> mx.array:
        return each.astype(mx.bfloat16) if casts(name) and mx.issubdtype(each.dtype, mx.floating) else each

    model.update(tree_map_with_path(in_bf16, model.parameters()))
    if how is not None:
        model, config = quantize_model(model, config, how.pop("group_size", None), how.pop("bits", None), **how)
    save_model(result, model)
    save_config(config, result / "config.json")
    tokens, found = mx.array([said]), {}
    for name, directory in (("mlx", result), ("ours", ours)):
        loaded, _ = load_model(directory)
        wide = tree_map_with_path(
            lambda _, each: each.astype(mx.float32) if mx.issubdtype(each.dtype, mx.floating) else each,
            loaded.parameters(),
        )
        loaded.update(wide)  # experts' values are multiplied on a CPU in FP32 alone
        found[name] = loaded(tokens).astype(mx.float32)
    mx.save_safetensors(str(logits), found)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), *map(json.loads, sys.argv[5:7]))
