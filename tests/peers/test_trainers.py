"""Checkpoints that real trainers write are read to the last bit; what is written of them, the trainers go on from."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import conversions
import environments
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from core_models import of_stages
from peer_runs import as_state_dict, assert_same, read_by_torch, run_ranks
from repository import HELPERS, ROOT
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.trainer_run import of_trainer
from precisionctl.checkpoints.run_reader import run_of
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.hints import open_hinted
from precisionctl.param import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HERE = Path(__file__).parent
NAMES = ("model", "optimizer")
RUNS = [(version, ranks) for version in (1, 2) for ranks in (1, 2)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"fsdp{run[0]}-ranks{run[1]}")
def accelerated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    folder, (version, ranks) = tmp_path_factory.mktemp("accelerate"), request.param
    run_ranks(sys.executable, ranks, "accelerate_fsdp.py", version, folder / "run")
    run, reference = folder / "run", folder / "run" / "config"
    conversions.run(run / "checkpoint-3", folder / "megatron", "megatron", "bf16", reference=reference, verify=True)
    conversions.run(folder / "megatron", folder / "back", "hf", container="dcp", verify=True)
    return folder, version, ranks


def test_accelerates_masters_and_moments_come_through_megatron_to_the_last_bit(
    accelerated: tuple[Path, int, int],
) -> None:
    """Those of the live run; of FSDP 1 those that torch's own loader finds."""
    folder, version, _ = accelerated
    if version == 1:
        found = FileSystemReader(folder / "back").read_metadata().state_dict_metadata
        tensors = {key: torch.empty(one.size) for key, one in found.items() if isinstance(one, TensorStorageMetadata)}
        parts = {name: {key: tensor for key, tensor in tensors.items() if key.startswith(name)} for name in NAMES}
        for part, directory in zip(parts.values(), ("pytorch_model_fsdp_0", "optimizer_0"), strict=True):
            reader = FileSystemReader(folder / "run" / "checkpoint-3" / directory)
            dcp.load(part, storage_reader=reader, no_dist=True)
        back = {key: torch.empty_like(one) for key, one in tensors.items()}
        dcp.load(back, storage_reader=FileSystemReader(folder / "back"), no_dist=True)
        assert_same({"": back}, {"": parts["model"] | parts["optimizer"]})
        return
    live = torch.load(folder / "run" / "live.pt")
    kinds = {kind: {name: state[kind] for name, state in live["state"].items()} for kind in ("exp_avg", "exp_avg_sq")}
    steps = {name: torch.as_tensor(state["step"]).float() for name, state in live["state"].items()}
    expected = as_state_dict(live["model"], **kinds, step=steps)
    assert_same(read_by_torch(folder / "back", expected), expected)


def test_hf_trainer_goes_on_from_what_came_through_megatron(accelerated: tuple[Path, int, int]) -> None:
    folder, version, ranks = accelerated
    if version == 1:
        pytest.skip("accelerate's FSDP 1 takes groups of parameters as they are in the file: all in the first")
    step = folder / "checkpoint-3"
    step.mkdir()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (step / name).symlink_to(folder / "back")
    for file in (folder / "run" / "checkpoint-3").iterdir():
        if file.is_file():  # the schedule, generators and the step
            shutil.copy(file, step)
    run_ranks(sys.executable, ranks, "accelerate_fsdp.py", version, folder / "resumed", step)
    whole, resumed = (json.loads((folder / run / "losses.json").read_text()) for run in ("run", "resumed"))
    assert len(whole) == 8 and resumed == whole


def torchtitan() -> Path:
    versions = (f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}")
    also = "torchdata datasets einops tyro tensorboard spmd_types==0.2.3 torch_checkpointing".split()
    return environments.python_with(
        "torchtitan", (*environments.OUR_VERSIONS, *versions, *also), ("--no-deps", "torchtitan==0.3.0")
    )


_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "deepseek-v3": {**_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 24, "num_nextn_predict_layers": 1},
    "deepseek-v3-q-proj": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "num_nextn_predict_layers": 0,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
}
"""Of the models of torchtitan_save.py."""


@pytest.mark.parametrize(
    ("model", "ranks", "fused"),
    [
        *(("llama", ranks, fused) for ranks, fused in ((1, True), (2, True), (2, False))),
        *((model, 1, True) for model in _CONFIGS if model != "llama"),
        *((model, 2, True) for model in ("qwen3-moe", "gpt-oss")),
    ],
)
def test_torchtitans_weights_and_moments_are_its_own_adapters_and_it_goes_on_from_ours_to_the_last_bit(
    tmp_path: Path, model: str, ranks: int, fused: bool
) -> None:
    """Of gpt-oss's experts the adapter has none: they are compared by what torchtitan goes on to, and by logits."""
    run_ranks(torchtitan(), ranks, "torchtitan_save.py", tmp_path, model, FUSED=str(int(fused)))
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    settings = {"model_type": model} | sizes | {"rope_parameters": rope} | _CONFIGS[model]
    transformers.AutoConfig.for_model(**settings).save_pretrained(tmp_path / "config")
    made, reference = tmp_path / "checkpoint" / "step-2", tmp_path / "config"
    conversions.run(made, tmp_path / "megatron", "megatron", "bf16", reference=reference, verify=True)
    conversions.run(made, tmp_path / "hf", "hf", reference=reference)
    live = torch.load(tmp_path / "live.pt")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    alone = {name: tensor for name, tensor in live["param"].items() if "_blocks" not in name}
    assert [name for name, tensor in alone.items() if not torch.equal(weights[name], tensor)] == []
    if ranks == 1:
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        with torch.no_grad():
            logits = ours(torch.arange(16).view(1, 16) * 5).logits
        assert torch.allclose(logits, live["logits"].float(), atol=0.02)  # torchtitan's experts compute in BF16
    if fused:  # as all of its own configs are
        conversions.run(tmp_path / "megatron", tmp_path / "on" / "checkpoint" / "step-2", "hf", container="torchtitan")
        run_ranks(torchtitan(), ranks, "torchtitan_save.py", tmp_path / "on", model, "on", FUSED="1")
        assert_same({"": torch.load(tmp_path / "on" / "resumed.pt")}, {"": torch.load(tmp_path / "after.pt")})
    if model in ("llama", "qwen3"):  # others have experts in one tensor in memory
        conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", container="dcp")
        expected = as_state_dict(live["param"], exp_avg=live["exp_avg"], exp_avg_sq=live["exp_avg_sq"])
        assert_same(read_by_torch(tmp_path / "back", expected), expected)


def olmo_core() -> Path:
    versions = (f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}")
    return environments.python_with("olmo_core", (*versions, "ai2-olmo-core==3.0.0"))


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        *((model, 1) for model in ("olmo2", "olmo3", "flex_olmo", "flex_olmo_dropless", "llama", "qwen3")),
        *((model, 2) for model in ("olmo2", "flex_olmo")),
        ("olmo_hybrid", 1),
    ],
)
def test_olmo_cores_weights_and_moments_are_its_own_converters(tmp_path: Path, model: str, ranks: int) -> None:
    """Of experts and delta nets there are no logits, and of the latter no optimizer: OLMo-core computes them with
    kernels alone."""
    run_ranks(olmo_core(), ranks, "olmo_core_save.py", tmp_path, model)
    made, reference = tmp_path / "step2", tmp_path / "config"
    conversions.run(made, tmp_path / "out", "hf", reference=reference, verify=True)
    live = torch.load(tmp_path / "live.pt")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == live["param"].keys()
    assert_same({"": weights}, {"": live["param"]})
    if "logits" in live:
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        with torch.no_grad():
            logits = ours(torch.arange(16).view(1, 16) * 5).logits
        assert torch.allclose(logits, live["logits"], atol=1e-6)
    if model == "olmo_hybrid":
        return
    reader = open_hinted(made, reference=reference)
    assert of_trainer(reader) and reader.trainer_run.updates == 2
    for kind in ("exp_avg", "exp_avg_sq"):
        found = {name: read_tensor(WithOptimizer(reader), f"optimizer.state.{kind}.{name}") for name in live[kind]}
        assert_same({"": found}, {"": live[kind]})
    conversions.run(made, tmp_path / "megatron", "megatron", "bf16", reference=reference, verify=True)


def litgpt() -> Path:
    version = torch.__version__.partition("+")[0]
    return environments.python_with("litgpt", (f"torch=={version}", "litgpt==0.5.13"))


_IN_LITGPT = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 16,
    "intermediate_size": 48,
    "vocab_size": 90,
    "padded_vocab_size": 96,
}
_IN_TRANSFORMERS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"n_expert": 4, "n_expert_per_token": 2}
_SQUARE = ({"n_query_groups": 4}, {"num_key_value_heads": 4, "layer_norm_eps": 1e-5})
_WINDOW = (
    {"attention_scores_scalar": 16, "sliding_window_size": 8},
    {"query_pre_attn_scalar": 16, "sliding_window": 8},
)
_OF_LITGPT: dict[str, tuple[str, float, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama-3-8B", 5e5, {}, {}),
    "mistral": ("Mistral-7B-v0.3", 1e6, {}, {"sliding_window": None}),
    "qwen2": ("Qwen2.5-0.5B", 1e6, {}, {"rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3-0.6B", 1e6, {}, {"rms_norm_eps": 1e-6}),
    "qwen3_moe": (
        "Qwen3-30B-A3B",
        1e6,
        {**_EXPERTS, "moe_intermediate_size": 24},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "rms_norm_eps": 1e-6}
        | {"norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral-8x7B-v0.1", 1e6, _EXPERTS, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma-7b", 1e4, {}, {}),
    "gemma2": ("Gemma-2-2b", 1e4, *_WINDOW),
    "gemma3_text": ("Gemma-3-1b-it", 0, {"n_layer": 6, **_WINDOW[0]}, {"num_hidden_layers": 6, **_WINDOW[1]}),
    "olmo2": ("OLMo-2-1124-7B", 5e5, {}, {"rms_norm_eps": 1e-6}),
    "phi": ("phi-2", 1e4, *_SQUARE),
    "phi3": ("Phi-3-mini-4k-instruct", 1e4, {}, {"sliding_window": None}),
    "gpt_neox": ("pythia-14m", 1e4, *_SQUARE),
    "stablelm": ("stablelm-3b-4e1t", 1e4, *_SQUARE),
}
"""Families, with a config of LitGPT, its rotary base, and what is changed of that and of Hugging Face's."""
_ROTARY_PART = {"phi": 0.4, "gpt_neox": 0.25, "stablelm": 0.25}


@pytest.mark.parametrize("family", _OF_LITGPT)
def test_litgpts_models_are_its_own_converters_and_compute_what_it_computes(tmp_path: Path, family: str) -> None:
    """Its converter drops the output layer of Gemma, which is LitGPT's own, and gives OLMo 2 up: there logits judge."""
    name, base, own, changes = _OF_LITGPT[family]
    run = [litgpt(), HERE / "litgpt_save.py", tmp_path, name, json.dumps(_IN_LITGPT | own)]
    subprocess.run(run, check=True, capture_output=True, timeout=300)
    rope = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": _ROTARY_PART.get(family, 1.0)}
    settings = _IN_TRANSFORMERS | changes | ({"rope_parameters": rope} if base else {})
    transformers.AutoConfig.for_model(family, **settings).save_pretrained(tmp_path / "config")
    for kind in ("lit", "older"):
        conversions.run(tmp_path / kind, tmp_path / f"{kind}-out", "hf", reference=tmp_path / "config", verify=True)
    weights, older = (load_file(tmp_path / kind / "model.safetensors") for kind in ("lit-out", "older-out"))
    assert weights.keys() == older.keys()
    assert_same({"": older}, {"": weights})
    theirs = tmp_path / "theirs" / "model.pth"
    if theirs.exists():
        converted = {name: tensor[: len(weights[name])] for name, tensor in torch.load(theirs).items()}
        assert weights.keys() - converted.keys() <= {"lm_head.weight"}
        assert_same({"": weights}, {"": converted})
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lit-out", dtype=torch.float32)
    with torch.no_grad():
        logits = ours(torch.arange(16).view(1, 16) * 5).logits
    assert torch.allclose(logits, torch.load(tmp_path / "logits.pt")[..., :90], atol=1e-5)
    conversions.run(tmp_path / "lit", tmp_path / "megatron", "megatron", reference=tmp_path / "config", verify=True)


def nanotron() -> Path:
    """What nanotron needs: it is a clone, for no release saves as it does now."""
    version = torch.__version__.partition("+")[0]
    also = "numpy packaging safetensors dacite tqdm pyyaml".split()
    versions = (f"torch=={version}", f"transformers=={transformers.__version__}")
    return environments.python_with("nanotron", (*environments.OUR_VERSIONS, *versions, *also))


@pytest.mark.parametrize(
    ("kind", "ranks"), [("plain", 1), ("plain", 2), ("interleaved", 1), ("interleaved", 2), ("tied", 2)]
)
def test_what_nanotron_saves_is_what_its_converter_makes_of_it(tmp_path: Path, kind: str, ranks: int) -> None:
    if "NANOTRON" not in os.environ:
        pytest.skip("NANOTRON names no clone of nanotron")
    run_ranks(nanotron(), ranks, "nanotron_save.py", tmp_path, kind)
    run_ranks(nanotron(), 1, "nanotron_save.py", tmp_path, kind, "judge")
    conversions.run(tmp_path / "10", tmp_path / "out", "hf", verify=True)
    theirs, ours = torch.load(tmp_path / "theirs.pt"), load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() - ours.keys() == ({"lm_head.weight"} if kind == "tied" else set())
    assert_same({"": theirs}, {"": ours})


def verl() -> Path:
    versions = (f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}")
    also = "accelerate peft omegaconf tensordict pytest".split()  # pytest for `core_models`, which the script imports
    return environments.python_with(
        "verl", (*environments.OUR_VERSIONS, *versions, *also), ("--no-deps", "verl==0.9.1")
    )


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (4, False)])
def test_what_verl_saves_of_fsdp_1_and_2_is_what_the_run_held(tmp_path: Path, ranks: int, tied: bool) -> None:
    """FSDP 1 trains the same bits as FSDP 2, which can say what it holds. Of four ranks two are a replica."""
    kinds = ("fsdp2", "fsdp1", "fsdp1-orig")
    for kind in kinds:
        run_ranks(verl(), ranks, "verl_save.py", tmp_path, kind, TIED=str(int(tied)))
    live = torch.load(tmp_path / "fsdp2" / "live.pt")
    moments = {kind: {name: state[kind] for name, state in live["state"].items()} for kind in ("exp_avg", "exp_avg_sq")}
    expected = as_state_dict(live["model"], **moments)
    for kind in kinds:
        run, back = tmp_path / kind / "global_step_2" / "actor", tmp_path / f"{kind}-back"
        conversions.run(run, back, "hf", container="dcp", verify=True)
        assert_same(read_by_torch(back, expected), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_fsdp_2_goes_on_from_what_came_through_megatron(tmp_path: Path, ranks: int) -> None:
    """No release of megatron-fsdp can save yet: MEGATRON_LM is a clone of Megatron-LM, of August 2026 or later."""
    if "MEGATRON_LM" not in os.environ:
        pytest.skip("MEGATRON_LM names no clone of Megatron-LM")
    path = f"{os.environ['MEGATRON_LM']}/megatron/core/distributed/fsdp/src"
    run_ranks(sys.executable, ranks, "megatron_fsdp_2.py", tmp_path / "run", PYTHONPATH=path)
    made, reference = tmp_path / "run" / "checkpoint", tmp_path / "run" / "config"
    conversions.run(made, tmp_path / "megatron", "megatron", "bf16", reference=reference, verify=True)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", container="dcp")
    run_ranks(sys.executable, ranks, "megatron_fsdp_2.py", tmp_path / "on", tmp_path / "back", PYTHONPATH=path)
    for rank in range(ranks):
        whole, resumed = (json.loads((tmp_path / run / f"losses-{rank}.json").read_text()) for run in ("run", "on"))
        assert len(whole) == 8 and resumed == whole[3:]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "way"), [(2, 2, "dp_reshardable"), (2, 2, "fully_reshardable"), (2, 1, "plain")]
)
def test_what_verl_saves_of_megatron_is_what_its_ranks_held(
    tmp_path: Path, tensor: int, pipeline: int, way: str
) -> None:
    found = importlib.util.find_spec("megatron.core")
    assert found and found.origin
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "megatron").symlink_to(Path(found.origin).parents[1])
    path = f"{tmp_path}/packages:{HELPERS}:{ROOT}"
    ranks = tensor * pipeline
    run_ranks(verl(), ranks, "verl_megatron_save.py", tmp_path, tensor, pipeline, way, PYTHONPATH=path)
    reader = open_checkpoint(tmp_path / "actor")
    assert isinstance(reader, TorchDistReader)
    held = of_stages(f"{tmp_path}/held", tensor, pipeline)
    assert reader.specs.keys() == held.keys()
    for kind in KINDS:
        of_optimizer = of_stages(f"{tmp_path}/held.optimizer.{kind}", tensor, pipeline)
        assert of_optimizer.keys() == reader.specs.keys()
        held |= {f"optimizer.state.{kind}.{name}": tensor for name, tensor in of_optimizer.items()}
    both = WithOptimizer(reader)
    assert [name for name, tensor in held.items() if not torch.equal(read_tensor(both, name), tensor)] == []
    assert both.specs.keys() == held.keys() and run_of(reader).updates == 1


def automodel() -> Path:
    """Its checkpointer asks for few of its requirements."""
    also = "torch transformers safetensors numpy pyyaml".split()
    return environments.python_with(
        "automodel", (*environments.OUR_VERSIONS, *also), ("--no-deps", "nemo-automodel==0.7.0")
    )


@pytest.mark.parametrize(("kind", "ranks"), [*(("dense", ranks) for ranks in (1, 2, 3)), ("experts", 4)])
def test_what_automodel_saves_is_what_the_run_held_and_comes_through_megatron(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    """Experts are over two ranks, and each over two: their weights and moments are those that its adapter names. In
    Megatron moments are where weights of their values would be."""
    run_ranks(automodel(), ranks, "automodel_save.py", tmp_path, kind)
    whole = tmp_path / "epoch_0_step_2" / "model" / "consolidated"
    held = load_file(tmp_path / "live.safetensors")
    states = {one: {n.removeprefix(f"{one}."): t for n, t in held.items() if n.startswith(f"{one}.")} for one in KINDS}
    live = {name: tensor for name, tensor in held.items() if not name.startswith("exp_avg")}
    assert conversions.tensors(tmp_path / "LATEST").keys() == conversions.tensors(whole).keys() == live.keys()
    assert_same({"": conversions.tensors(whole)}, {"": live})
    conversions.run(tmp_path / "LATEST", tmp_path / "megatron", "megatron", "bf16", verify=True)
    reader = open_checkpoint(tmp_path / "megatron")
    assert isinstance(reader, TorchDistReader)
    for one, tensors in {**states, "param": live}.items():
        made = shutil.copytree(whole, tmp_path / one)
        save_file(tensors, made / "model-00001-of-00001.safetensors")
        conversions.run(made, tmp_path / f"{one}-megatron", "megatron")
        expected = conversions.tensors(tmp_path / f"{one}-megatron")
        found = {name: read_tensor(WithOptimizer(reader), f"optimizer.state.{one}.{name}") for name in expected}
        assert found.keys() == reader.specs.keys()
        assert_same({"": found}, {"": expected})


def test_automodels_adapter_is_merged_as_it_computes(tmp_path: Path) -> None:
    run_ranks(automodel(), 2, "automodel_save.py", tmp_path, "lora")
    conversions.run(tmp_path / "epoch_0_step_2" / "model", tmp_path / "hf", "hf", reference=tmp_path / "base")
    merged, live = load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "live.safetensors")
    assert merged.keys() == live.keys()
    assert max(float((merged[name] - one).abs().max()) for name, one in live.items()) < 1e-6
