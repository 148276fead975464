"""Losses that keep experts' loads even, held against transformers, Megatron-Core and the papers."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pico
import pytest
import torch
from conversions import change_args, run as convert
from gpt_models import VOCABULARY, converted, transformers_model
from in_memory import InMemory
from soaking import few, in_soak
from torch import Tensor
from training import losses, make_source, make_text, run, settings

from precisionctl.checkpoints.base import Companions
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.errors import DamagedCheckpoint, RecipeError
from precisionctl.precision import PRESETS
from precisionctl.recipe import RouterSettings, load_recipe
from precisionctl.trainer.data.batch import IGNORED, Batch
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.router_balance import NO_BALANCE, Balance
from precisionctl.trainer.passes import backward
from precisionctl.trainer.saved.balance import balance_of

LAYER_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def gpt(made: InMemory, balance: Balance, recompute: bool = False) -> GPT:
    model = GPT(made.model, PRESETS["bf16"], dtype=torch.float32, recompute=recompute, balance=balance)
    model.load_state_dict(dict(made.tensors))
    return model


def batch_of(tokens: Tensor, padding: int = 0) -> Batch:
    """The last `padding` positions of the first row are padding."""
    labels, real = tokens[:, 1:].clone(), torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    if padding:
        real[0, -padding:], labels[0, -padding:] = False, IGNORED
    return Batch(tokens[:, :-1], labels, real)


def logged(model: GPT, targets: int) -> dict[str, float]:
    losses = model.router_losses
    assert losses
    return dict(zip(losses.names, (losses.sums / targets).tolist(), strict=True))


@pytest.mark.parametrize("family", ["qwen3-moe", *in_soak("mixtral", "olmoe")])
def test_thirty_steps_with_the_pooled_loss_are_transformers(family: str, tmp_path: Path) -> None:
    coefficient = 0.3  # much larger than any model's, so that it moves the routers
    theirs = transformers_model(family, output_router_logits=True, router_aux_loss_coef=coefficient)
    ours = gpt(converted(theirs, tmp_path), Balance(pooled_loss=coefficient))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (theirs, ours)]
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(30):
        batch = batch_of(torch.randint(VOCABULARY, (3, 17), generator=generator), padding=5 if step % 2 else 0)
        expected = theirs(input_ids=batch.tokens, attention_mask=batch.padding_mask.long(), labels=None)
        mine = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), batch.labels.flatten())
        (mine + coefficient * expected.aux_loss).backward()
        ours.router_losses.begin_update()
        total = float(backward(ours, batch, batch.targets)) / batch.targets
        assert total == pytest.approx(mine.item(), rel=1e-4)
        assert logged(ours, batch.targets)["pooled_loss"] == pytest.approx(expected.aux_loss.item(), rel=1e-4)
        seen.append(expected.aux_loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert min(seen[-5:]) < 0.99 * seen[0]  # it does something


def routers_of(model: GPT, batch: Batch) -> list[Tensor]:
    """Logits of all routers, `[B * S, E]`, with their graph to the weights."""
    found = []

    def hook(router: Any, inputs: tuple[Tensor, ...], _: object) -> None:
        found.append(torch.nn.functional.linear(inputs[0].float(), router.weight.float()))

    hooks = [module.register_forward_hook(hook) for name, module in model.named_modules() if name.endswith(".router")]
    model(batch.tokens, batch.padding_mask)
    for each in hooks:
        each.remove()
    return found


def by_megatron(logits: list[Tensor], rows: int, moe: Any) -> dict[str, float]:
    """The mean over layers of each loss, by Megatron-Core's own functions with its arguments (router.py)."""
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        switch_load_balancing_loss_func,
        z_loss_func,
    )

    made: dict[str, list[float]] = {}
    for of_layer in logits:
        chosen, scores = compute_routing_scores_for_aux_loss(of_layer, moe.topk, moe.score_function)
        whole = dict(topk=moe.topk, num_experts=moe.num_experts, moe_aux_loss_coeff=1.0)
        tokens = len(of_layer)
        counts = chosen.sum(0)
        aux = switch_load_balancing_loss_func(scores, counts, tokens, **whole)
        by_row = [part.view(rows, tokens // rows, -1).transpose(0, 1).flatten(1) for part in (chosen, scores)]
        seq = switch_load_balancing_loss_func(by_row[1], by_row[0].sum(0), tokens // rows, **whole) / rows
        for name, value in {"aux_loss": aux, "seq_aux_loss": seq, "z_loss": z_loss_func(of_layer, 1.0)}.items():
            made.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in made.items()}


@pytest.mark.soak  # importing megatron-core takes ten seconds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "deepseek-v2-groups", "deepseek-v3"])
def test_losses_of_layers_are_megatron_core_s(family: str, tmp_path: Path) -> None:
    made = converted(transformers_model(family), tmp_path)
    model = gpt(made, Balance(aux_loss=0.1, seq_aux_loss=0.1, z_loss=0.1))
    batch = batch_of(torch.randint(VOCABULARY, (3, 17)))
    with torch.no_grad():
        expected = by_megatron(routers_of(model, batch), 3, made.model.moe)
    backward(model, batch, batch.targets)
    assert logged(model, batch.targets) == pytest.approx(expected, rel=1e-5)
    assert expected["seq_aux_loss"] > expected["aux_loss"]


def gradients(model: GPT, batches: list[Batch]) -> dict[str, Tensor]:
    model.zero_grad()
    assert model.router_losses
    model.router_losses.begin_update()
    for batch in batches:
        backward(model, batch, sum(batch.targets for batch in batches))
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def test_the_gradient_is_that_of_the_papers_formulas(tmp_path: Path) -> None:
    """Written token by token: Switch Transformer's equations 4 to 6, DeepSeek-V3's 17 to 20, ST-MoE's 5."""
    made = converted(transformers_model("deepseek-v3"), tmp_path)
    balance = Balance(aux_loss=0.4, seq_aux_loss=0.3, z_loss=0.02)
    batch, moe = batch_of(torch.randint(VOCABULARY, (2, 9)), padding=3), made.model.moe
    model = gpt(made, balance)
    found = gradients(model, [batch])
    plain = gradients(gpt(made, Balance(z_loss=1e-30)), [batch])
    total = torch.zeros(())
    for logits in routers_of(model, batch):
        rows = [row[real] for row, real in zip(logits.view(2, 8, -1), batch.padding_mask, strict=True)]
        total = total + balance.aux_loss * written_out(torch.cat(rows), moe)
        total = total + balance.seq_aux_loss * sum(written_out(row, moe) for row in rows) / 2
        squares = [token.exp().sum().log() ** 2 for token in torch.cat(rows)]
        total = total + balance.z_loss * sum(squares) / len(squares)
    model.zero_grad()
    total.backward()
    routers = [name for name in found if name.endswith("router.weight")]
    assert routers
    for name in routers:
        expected = plain[name] + dict(model.named_parameters())[name].grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
        assert not torch.allclose(found[name], plain[name], rtol=0.1)


def written_out(logits: Tensor, moe: Any) -> Tensor:
    f, p = torch.zeros(moe.num_experts), torch.zeros(moe.num_experts)
    for token in logits:
        scores = token.sigmoid() / token.sigmoid().sum()
        for expert in scores.argsort(descending=True)[: moe.topk].tolist():
            f[expert] += moe.num_experts / (moe.topk * len(logits))
        p = p + scores / len(logits)
    return (f * p).sum()


@pytest.mark.parametrize("kind", few(["pooled_loss", *LAYER_LOSSES, "z_loss"], "pooled_loss", "global_aux_loss"))
def test_recomputed_layers_have_the_same_gradients(kind: str, tmp_path: Path) -> None:
    made = converted(transformers_model("qwen3-moe"), tmp_path)
    batches = [batch_of(torch.randint(VOCABULARY, (2, 17))) for _ in range(2)]
    kept, again = (gradients(gpt(made, Balance(**{kind: 0.3}), recompute), batches) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_micro_batches_count_by_their_targets_and_an_update_s_choices_add_up(tmp_path: Path) -> None:
    """The loss of each row, and the z-loss, are the same in one pass as in two; so is, in its last pass, the loss whose
    choices are those of the whole update."""
    made = converted(transformers_model("mixtral"), tmp_path)
    tokens = torch.randint(VOCABULARY, (4, 17))
    one, two = batch_of(tokens), [batch_of(tokens[:2]), batch_of(tokens[2:])]
    linear = Balance(seq_aux_loss=0.3, z_loss=0.1)
    whole, parts = gradients(gpt(made, linear), [one]), gradients(gpt(made, linear), two)
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    model = gpt(made, Balance(global_aux_loss=1.0))
    with torch.no_grad():
        logits = [routers_of(model, batch) for batch in (one, *two)]
    gradients(model, two)
    seen = []
    for part, before in ((1, 1), (2, 0)):
        for layer, of_all in enumerate(logits[0]):
            so_far = logits[before][layer] if before else of_all
            f = torch.nn.functional.one_hot(so_far.topk(made.model.moe.topk).indices, 4).float().mean((0, 1))
            seen.append(4 * float((f * logits[part][layer].softmax(-1).mean(0)).sum()))
    assert logged(model, one.targets)["global_aux_loss"] == pytest.approx(sum(seen) / len(seen), rel=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"router_aux_loss_coef": 0.02, "output_router_logits": False}, Balance(pooled_loss=0.02)),
        ({"router_aux_loss_coef": 0}, NO_BALANCE),
        ({}, NO_BALANCE),
        ({"aux_loss_alpha": 0.001, "seq_aux": True}, Balance(seq_aux_loss=0.001)),
        ({"aux_loss_alpha": 0.001, "seq_aux": False}, Balance(aux_loss=0.001)),
    ],
)
def test_config_json_turns_losses_on(config: dict[str, Any], expected: Balance) -> None:
    assert balance_of(described(config), RouterSettings()) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"moe_aux_loss_coeff": 0.0}, NO_BALANCE),
        (
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.2},
            Balance(global_aux_loss=0.1, z_loss=0.2),
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
            Balance(aux_loss=0.1, seq_aux_loss=0.2),
        ),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, NO_BALANCE),
        (
            {"moe_aux_loss_coeff": 0, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3},
            Balance(bias_update_rate=1e-3),
        ),
        ({"moe_aux_loss_coeff": 0, "moe_router_bias_update_rate": 1e-3}, NO_BALANCE),
    ],
)
def test_megatron_s_arguments_turn_losses_on_before_config_json_does(args: dict[str, Any], expected: Balance) -> None:
    source = described({"router_aux_loss_coef": 0.02})
    source.layout, source.args = "megatron", args
    assert balance_of(source, RouterSettings()) == expected


def described(config: dict[str, Any], family: str = "mixtral") -> Any:
    """What `balance_of` looks at of a checkpoint."""
    files = {"config.json": json.dumps({"model_type": "mixtral"} | config).encode()}
    companions = Companions(files, directory=Path("beside"))
    return SimpleNamespace(model=pico.shape(family), layout="hf", companions=companions, path=Path("it"))


def test_the_recipe_wins_key_by_key() -> None:
    router = load_recipe("bf16", ["router.z_loss=0.001", "router.pooled_loss=0"]).router
    config = {"router_aux_loss_coef": 0.02, "aux_loss_alpha": 0.1}
    assert balance_of(described(config), router) == Balance(seq_aux_loss=0.1, z_loss=0.001)


@pytest.mark.parametrize("value", ["much", -1, True, [0.1], 1e999])
def test_a_coefficient_of_a_stranger_that_is_none_is_refused(value: object) -> None:
    config = {"router_aux_loss_coef": value}
    with pytest.raises(
        DamagedCheckpoint, match=r"`router_aux_loss_coef`.*beside/config.json.*--set router.pooled_loss=0"
    ):
        balance_of(described(config), RouterSettings())
    assert balance_of(described(config), RouterSettings(pooled_loss=0.0)) == NO_BALANCE
    source = described({})
    source.layout, source.args = "megatron", {"moe_aux_loss_coeff": value, "moe_router_load_balancing_type": ["x"] * 2}
    with pytest.raises(DamagedCheckpoint, match="as Megatron does not"):
        balance_of(source, RouterSettings())
    source.args = {"moe_aux_loss_coeff": 0, "moe_z_loss_coeff": value}
    with pytest.raises(DamagedCheckpoint, match=r"`moe_z_loss_coeff`.*\(it\).*--set router.z_loss=0"):
        balance_of(source, RouterSettings())


def test_a_coefficient_of_the_recipe_that_is_too_large_is_the_recipes_error() -> None:
    with pytest.raises(RecipeError, match="router.pooled_loss is 1e"):
        balance_of(described({}), load_recipe("bf16", ["router.pooled_loss=1e308"]).router)


@pytest.mark.parametrize(
    ("family", "key", "message"),
    [
        ("llama-3", "aux_loss", "the model has none"),
        ("mixtral", "bias_update_rate", "moves an expert_bias, and the model has none"),
    ],
)
def test_what_the_model_has_not_cannot_be_balanced(family: str, key: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        balance_of(described({}, family), load_recipe("bf16", [f"router.{key}=0.1"]).router)
    assert balance_of(described({}, family), load_recipe("bf16", [f"router.{key}=0"]).router) == NO_BALANCE


def test_of_what_balances_experts_that_is_named_which_is_on() -> None:
    with pytest.raises(RecipeError, match="router.z_loss balances"):
        balance_of(described({}, "llama-3"), RouterSettings(aux_loss=0.0, z_loss=0.1))


def test_a_value_that_is_neither_a_number_nor_the_word_is_refused() -> None:
    with pytest.raises(RecipeError, match="is not a number or one of checkpoint"):
        load_recipe("bf16", ["router.aux_loss=sometimes"])


def test_a_run_says_and_logs_its_losses_and_branches_keep_them(tmp_path: Path) -> None:
    source, data = make_source(tmp_path / "hf", family="mixtral", router_aux_loss_coef=0.02), make_text(tmp_path / "t")
    keys = {"train__steps": 1, "router__z_loss": 0.001}
    started, _, _ = run(settings(source, data, tmp_path / "run", **keys))
    assert "experts are kept in balance by pooled_loss 0.02, z_loss 0.001" in started.notes
    seen = [dict(step) for step in losses(tmp_path / "run")]
    assert all(2 <= step["router_pooled_loss"] < 3 and step["router_z_loss"] > 0 for step in seen)  # 2 experts a token
    branch = settings(tmp_path / "run", data, tmp_path / "branch", train__steps=2)
    assert "experts are kept in balance by pooled_loss 0.02, z_loss 0.001" in run(branch)[0].notes


def test_the_bias_moves_towards_experts_that_were_chosen_too_seldom(tmp_path: Path) -> None:
    """In an update of two passes; not in one that is skipped."""
    made = converted(transformers_model("deepseek-v3"), tmp_path)
    model = gpt(made, Balance(bias_update_rate=0.25))
    before = {name: each.clone() for name, each in model.named_parameters() if name.endswith("expert_bias")}
    batches, loads = [batch_of(torch.randint(VOCABULARY, (2, 17)), padding=4) for _ in range(2)], {}
    for name, router in model.named_modules():
        if name.endswith(".router"):
            router.register_forward_hook(partial(count, loads, f"{name}.expert_bias", batches))
    gradients(model, batches)
    assert model.router_losses and set(loads) == set(before) and before
    model.router_losses.update_biases(torch.tensor(True))
    assert all(torch.equal(dict(model.named_parameters())[name], bias) for name, bias in before.items())
    model.router_losses.update_biases(torch.tensor(False))
    for name, bias in before.items():
        chosen = sum(loads[name])
        step = 0.25 * (chosen.float().mean() - chosen).sign()
        assert torch.equal(dict(model.named_parameters())[name], bias + step) and len(step.unique()) > 1


def count(
    loads: dict[str, list[Tensor]], name: str, batches: list[Batch], router: Any, _: object, out: tuple[Tensor, ...]
) -> None:
    """A router's choices for real tokens, `[E]`."""
    real = batches[len(loads.setdefault(name, []))].padding_mask.flatten()
    loads[name].append(out[1][real].flatten().bincount(minlength=router.moe.num_experts))


@pytest.mark.parametrize("factor", [1.25, *in_soak(-1.0, None)])  # which other tests' checkpoints have
def test_tokens_that_megatron_drops_and_nothing_here_does_are_told_of(factor: float | None, tmp_path: Path) -> None:
    """megatron/core/transformer/moe/router.py, TopKRouter.routing: a capacity factor counts outside of training too;
    transformer_config.py: below 0 it is none."""
    source = make_source(tmp_path / "hf", family="mixtral")
    convert(source, tmp_path / "m", "megatron")
    change_args(tmp_path / "m" / "release", moe_expert_capacity_factor=factor)
    told = [
        any(f"moe_expert_capacity_factor={factor}" in note for note in notes)
        for notes in (
            plan_command(Request(tmp_path / "m", tmp_path / "out", "hf")).notes,
            plan_command(Request.export(tmp_path / "m", tmp_path / "out", "vllm", "dynamic")).notes,
            run(settings(tmp_path / "m", make_text(tmp_path / "text"), tmp_path / "run", train__steps=1))[0].notes,
        )
    ]
    assert told == [factor == 1.25] * 3
