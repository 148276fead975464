"""What metadata say of single families, and what is refused of them."""

from pathlib import Path
from typing import Any

import gguf_files
import pico
import pytest

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.gguf.families import of_llama_cpp
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import UnknownArchitecture


@pytest.mark.parametrize("family", ["stablelm", "phi"])
def test_the_base_of_rotary_embeddings_is_said_where_llama_cpp_would_take_another(family: str) -> None:
    changes = gguf_files.WRITTEN[family]
    usual = gguf_files.metadata(from_hf_config(pico.config(family, **changes)))
    parameters = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    other = gguf_files.metadata(from_hf_config(pico.config(family, **changes | {"rope_parameters": parameters})))
    key = next(iter(other.keys() - usual.keys()))
    assert key.endswith(".rope.freq_base") and other[key] == 1e6


def test_a_jamba_without_experts_says_that_there_is_one(tmp_path: Path) -> None:
    published = gguf_files.source(tmp_path / "hf", "jamba", num_experts=1)
    file = gguf_files.export(published, tmp_path / "out")
    assert read_head(file).metadata["jamba.expert_count"] == 1
    hints = Hints(companions=read_companions(published), reference=published)
    assert open_checkpoint(file, None, hints).model == open_checkpoint(published).model
    assert open_checkpoint(file).model.moe is None


@pytest.mark.parametrize("shared", [0, 48])
def test_a_granite_with_a_shared_expert_is_read_as_one(tmp_path: Path, shared: int) -> None:
    published = gguf_files.source(tmp_path / "hf", "granite-moe-shared", shared_intermediate_size=shared)
    found = open_checkpoint(gguf_files.export(published, tmp_path / "out")).model
    assert found.architecture == ("granitemoeshared" if shared else "granitemoe")
    assert found.moe and found.moe.shared_ffn_hidden_size == (shared or None)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("cohere2-moe", {"shared_expert_combination_strategy": "sum"}, "shared_average"),
        ("cohere2-moe", {"sliding_window": None}, "rope_layers"),
        ("cohere2-moe", {"prefix_dense_sliding_window_pattern": 2, "first_k_dense_replace": 2}, "rope_layers"),
        ("arcee", {"mlp_bias": True}, "mlp_bias"),
        ("jamba", {"mamba_expand": 4}, "256 channels"),
        ("phi", {"hidden_act": "gelu"}, "activation"),
        ("stablelm", {"tie_word_embeddings": True}, "tied_embeddings"),
        ("dots1", {"num_key_value_heads": 2}, "num_query_groups"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownArchitecture, match=why):
        of_llama_cpp(from_hf_config(pico.config(family, **gguf_files.WRITTEN[family] | changes)))
