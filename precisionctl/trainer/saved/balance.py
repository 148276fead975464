"""What keeps the loads of experts even in a run, as its checkpoint and its recipe say it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from precisionctl.architectures.wrappers import is_wrapper, text_config
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.errors import DamagedCheckpoint, RecipeError, damage
from precisionctl.model.model_shape import ModelShape
from precisionctl.recipe import RouterSettings
from precisionctl.trainer.model.router_balance import NO_BALANCE, Balance
from precisionctl.trainer.saved.run_folder import saved_of
from precisionctl.untrusted.safe_json import parse_json


def balance_of(source: Reader, router: RouterSettings) -> Balance:
    """What keeps the loads of experts even in a run. What the recipe does not set is as in the checkpoint: in the
    `run.json` of a run of ours, else in Megatron's arguments if they mention it, else in config.json.
    (`output_router_logits` there plays no role: it is about what a forward returns.)

    Raises RecipeError for a setting that the model has no use for, and DamagedCheckpoint for values that make no sense.
    """
    chosen = {key: value for key, value in vars(router).items() if value != "checkpoint"}
    if source.model.moe is None:
        if on := [key for key, value in chosen.items() if value]:
            raise RecipeError(f"router.{on[0]} balances experts, and the model has none", do="Leave it out.")
        return NO_BALANCE
    if chosen.get("bias_update_rate") and not source.model.has("moe.expert_bias"):
        raise RecipeError("router.bias_update_rate moves an expert_bias, and the model has none", do="Leave it out.")
    saved = saved_of(source)
    if saved and saved.balance is not None:
        theirs = Balance(**saved.balance)
    elif of_megatron(source) and "moe_aux_loss_coeff" in source.args:
        with damage("its arguments balance experts as Megatron does not", source.path):
            found = _of_megatron(source.args)
        theirs = _checked(found, chosen, source.path)
    else:
        theirs = _checked(_of_config(source), chosen, source.companions.config_path)
    try:
        return replace(theirs, **chosen)
    except ValueError as error:
        raise RecipeError(f"router.{error}") from None


_Named = Mapping[str, tuple[str, Any]]
"""Coefficients by Balance's names, each with its key in the checkpoint."""


def _checked(found: _Named, chosen: Collection[str], where: Path | None) -> Balance:
    """The checkpoint's coefficients, without those that the recipe sets (`chosen`). Raises DamagedCheckpoint for a
    value that is no coefficient."""
    kept = {name: one for name, one in found.items() if name not in chosen}
    for name, (key, value) in kept.items():
        try:
            Balance(**{name: value})
        except ValueError as error:
            do = f"Correct it, or say what it is to be: --set router.{name}=0."
            raise DamagedCheckpoint(f"by its `{key}`, {error}", where=where, do=do) from None
    return Balance(**{name: value for name, (_, value) in kept.items()})


_OF_LAYERS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def _of_megatron(args: Mapping[str, Any]) -> _Named:
    kinds, coefficients = args.get("moe_router_load_balancing_type", "aux_loss"), args["moe_aux_loss_coeff"]
    listed = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    rate = (args.get("moe_router_enable_expert_bias") and args.get("moe_router_bias_update_rate")) or 0.0
    return {
        **{kind: ("moe_aux_loss_coeff", coefficient) for kind, coefficient in listed if kind in _OF_LAYERS},
        "z_loss": ("moe_z_loss_coeff", args.get("moe_z_loss_coeff") or 0.0),
        "bias_update_rate": ("moe_router_bias_update_rate", rate),
    }


def balance_args(balance: Balance) -> dict[str, Any]:
    """The inverse: Megatron's arguments, which have no word for `pooled_loss`."""
    kinds = [name for name in _OF_LAYERS if name in balance.on]
    coefficients = [balance.on[name] for name in kinds]
    return {
        "moe_router_load_balancing_type": kinds if len(kinds) > 1 else kinds[0] if kinds else "none",
        "moe_aux_loss_coeff": coefficients if len(kinds) > 1 else coefficients[0] if kinds else 0.0,
        "moe_z_loss_coeff": balance.z_loss or None,
        "moe_router_bias_update_rate": balance.bias_update_rate,
    }


def _of_config(source: Reader) -> _Named:
    """transformers' `router_aux_loss_coef`, or DeepSeek's `aux_loss_alpha` with `seq_aux`."""
    if "config.json" not in source.companions.files:
        return {}
    config = parse_json(source.companions.files["config.json"], "config.json")
    config = text_config(config) if is_wrapper(config) else config
    of_row = "seq_aux_loss" if config.get("seq_aux", True) else "aux_loss"
    keys = {"pooled_loss": "router_aux_loss_coef", of_row: "aux_loss_alpha"}
    return {name: (key, config[key]) for name, key in keys.items() if config.get(key) is not None}


def balance_notes(model: ModelShape, balance: Balance) -> Iterator[str]:
    """What keeps the loads of experts even, for the user."""
    if model.moe is None:
        return
    on = ", ".join(f"{name} {value:g}" for name, value in balance.on.items())
    yield f"experts are kept in balance by {on}" if on else "nothing keeps the experts in balance"
