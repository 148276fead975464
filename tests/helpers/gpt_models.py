"""Pico models of transformers and the GPTs that compute the same."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pico
import torch
from in_memory import InMemory, to_megatron
from installed import BEFORE_5_23
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from precisionctl.architectures.families import architecture_of, from_hf_config
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.param import NOT_TRAINED
from precisionctl.precision import PRESETS
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.sequences import PackedSequences

VOCABULARY = pico.SIZES["vocab_size"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in pico.FAMILIES} | {
    # of fewer heads many scores are exactly 0, and which of these keys an indexer chooses is an accident of the length
    "deepseek-v4": ("deepseek-v4", {"index_n_heads": 16}),
    # before transformers 5.23 its norm had one group, whatever config.json said
    **{name: (name, pico.ONE_GROUP[name]) for name in pico.ONE_GROUP if BEFORE_5_23},
    "granite-hybrid-dense": (  # whose first layer reads all tokens nearly alike with its own multiplier
        "granite-hybrid-dense",
        {"attention_multiplier": 0.5} | (pico.ONE_GROUP["granite-hybrid-dense"] if BEFORE_5_23 else {}),
    ),
    "llama stretched": ("llama-2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama to be stretched": (
        "llama-2",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama of which some pairs turn": (
        "llama-2",
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.3,
                "factor": 2.0,
            }
        },
    ),
    "qwen2 with YaRN": ("qwen2", {"rope_parameters": pico.YARN_ROPE}),
    "phi3 turned in part": (
        "phi3",
        {
            "rope_parameters": pico.LONG_ROPE
            | {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
    "gemma3 stretched": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "mistral with a window longer than the text": ("mistral", {"sliding_window": 99}),
    "phimoe within its longer context": (  # beyond it transformers still takes the short factors
        "phimoe",
        {
            "rope_parameters": pico.LONG_ROPE
            | {"original_max_position_embeddings": 128, "short_mscale": 1.2, "long_mscale": 1.2},
            "attention_bias": False,
        },
    ),
    "olmo that clamps nothing": ("olmo", {"clip_qkv": None, "attention_bias": True}),
    "exaone4 without a window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gpt-neox with one block after the other": ("gpt-neox", {"use_parallel_residual": False}),  # RedPajama-INCITE 3B
    "ministral3 whose queries do not grow": (  # as Devstral 2's
        "ministral3",
        {
            "rope_parameters": pico.YARN_ROPE
            | {"beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}
        },
    ),
    "minicpm3 with its scaling": (  # the published factors are other numbers
        "minicpm3",
        {
            "qk_rope_head_dim": 16,
            "rope_parameters": pico.LONG_ROPE
            | {"original_max_position_embeddings": 8, "factor": 16.0},  # 5.17 looks for it
        },
    ),
    "falcon with a key for each head": ("falcon", {"multi_query": False}),
    **({} if "ling-3" in pico.ABSENT else {"ling-3 whose decays have no bound": ("ling-3", {"kda_safe_gate": False})}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
}
"""Families, and what else is changed in them. Their windows, and the contexts that rope scaling starts from, are
shorter than the texts below."""


def converted(theirs: PreTrainedModel, directory: Path) -> InMemory:
    """A model as its family's table makes it for Megatron, its vocabulary padded."""
    theirs.save_pretrained(directory)
    return to_megatron(HuggingFaceReader(directory))


def as_gpt(made: InMemory) -> GPT:
    model = GPT(made.model, PRESETS["bf16"], dtype=torch.float32)
    model.load_state_dict(dict(made.tensors))
    return model


def both_gradients(theirs: PreTrainedModel, ours: GPT) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of every parameter that GPT trains, and transformers has: its name, ours, and transformers' in Megatron's layout.
    What only one of the two trains fails."""
    expected, left = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for row in architecture_of(ours.model.architecture).spelled({}, ours.model, naming="in memory"):
        for place in row.places(ours.model) if row.present.in_layout("hf", ours.model) else ():
            (name,) = names(row, "megatron", place)
            parameter = left.pop(name)
            if parameter.requires_grad:
                parts = [_gradient(expected, each) for each in names(row, "hf", place)]
                merged = row.merge(parts, ours.model) - row.merge([each * 0 for each in parts], ours.model)  # no 1 less
                assert parameter.grad is not None, name
                yield name, parameter.grad[: len(merged)], merged
            else:
                assert name.endswith(NOT_TRAINED) or ".indexer." in name, name
    assert not [name for name, parameter in left.items() if parameter.requires_grad]


def _gradient(parameters: dict[str, torch.nn.Parameter], name: str) -> Tensor:
    base, number = stored_name(name)
    gradient = parameters[base].grad
    assert gradient is not None, name
    return gradient if number is None else gradient[number]


def assert_computes_as_transformers(config: Mapping[str, Any], directory: Path) -> None:
    """Our GPT of a model that transformers makes of this config.json has its logits, and the config.json that
    transformers writes of it describes the same model."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))
    ours = as_gpt(converted(theirs.eval(), directory))
    tokens = clear_tokens(ours, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens)[..., :VOCABULARY], expected, rtol=0, atol=1e-5 * float(expected.std()))
    assert differences(ours.model, from_hf_config(config)) == {}


def assert_text_is_computed(theirs: PreTrainedModel, directory: Path) -> None:
    """The text model of a wrapper that is stored there has the logits of transformers."""
    made = to_megatron(open_checkpoint(directory))
    made.tensors = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("towers.")}
    ours = as_gpt(made)
    tokens = clear_tokens(ours, (2, 24), 80)
    with torch.no_grad():
        expected, found = theirs(input_ids=tokens).logits, ours(tokens)[..., :80]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


def assert_texts_are_apart(family: str, directory: Path, lengths: Sequence[int] = (5, 7, 12)) -> None:
    """That our GPT computes texts which share two rows as it computes each alone, and not as the rows."""
    model = as_gpt(converted(transformers_model(family), directory))
    tokens = clear_tokens(model, (2, sum(lengths) // 2))
    with torch.no_grad():
        shared = model(tokens, packed=PackedSequences(tuple(lengths))).flatten(0, 1)
        alone = [model(text[None])[0] for text in torch.split(tokens.flatten(), list(lengths))]
        torch.testing.assert_close(shared, torch.cat(alone), rtol=0, atol=1e-5)
        assert (shared - model(tokens).flatten(0, 1)).abs().max() > 1e-2


class _Margins(TorchFunctionMode):
    """The least distance by which a `topk` left out what it did not choose, or ten times that of a value from the limit
    of a clamp: of these there are many more, and each was rounded a few times only."""

    least = math.inf

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.topk:
            scores, number = args[0].sort(-1, descending=True).values, args[1]
            if number < scores.shape[-1]:
                last, next_best = scores[..., number - 1], scores[..., number]
                margins = (last - next_best).masked_fill(~last.isfinite(), math.inf)
                margins = margins.masked_fill((last == 0) & (next_best == 0), math.inf)  # a ReLU's, in every rounding
                self.least = min(self.least, float(margins.min()))
        elif function is Tensor.clamp:
            limits = [limit for limit in (*args[1:], *(kwargs or {}).values()) if isinstance(limit, float)]
            self.least = min([self.least, *(10 * float((args[0] - limit).abs().min()) for limit in limits)])
        return function(*args, **kwargs or {})


def clear_tokens(model: GPT, shape: tuple[int, ...], vocabulary: int = VOCABULARY) -> Tensor:
    """Random tokens that leave no router, no indexer and no clamp in doubt. Of one in a hundred draws a token's experts
    would be decided by how a processor rounds, and one model would choose others than the other; or a value would be
    as large as its limit in one alone, which has no gradient then."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        tokens = torch.randint(vocabulary, shape, generator=generator)
        with torch.no_grad(), _Margins() as margins:
            model(tokens)
        if margins.least > 4e-6:
            return tokens
    raise AssertionError(f"20 draws left out something by {margins.least} or less")


def everywhere(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def backward(logits: Tensor, tokens: Tensor) -> None:
    loss(logits, tokens, everywhere(tokens), VOCABULARY).backward()


def same_state(one: Any, other: Any) -> bool:
    return all(
        torch.equal(one.roles[role].scale, other.roles[role].scale)
        and torch.equal(one.roles[role].amax_history, other.roles[role].amax_history)
        for role in one.roles
    )


def tiny_shape() -> ModelShape:
    return from_hf_config(transformers_model("llama-2", num_key_value_heads=2).config.to_dict())


def transformers_model(family: str, **changes: Any) -> PreTrainedModel:
    """Weights large enough for attention to be far from uniform."""
    return pico.make(family, initializer_range=0.12, **changes)
