"""The learning rate of an update: of the recipe's schedule, or of Megatron's that a run continues."""

import math

from precisionctl.recipe import Recipe, Schedule
from precisionctl.trainer.optimizer.megatron_schedule import MegatronSchedule


def rate_of_update(step: int, recipe: Recipe, schedule: MegatronSchedule | None) -> float:
    """The learning rate of update `step`, counted from 1: of the `schedule` that the run continues, else of the
    recipe."""
    if schedule:
        return schedule.rate(step, recipe.train.batch_size)
    return learning_rate(step, recipe.train.steps, recipe.optimizer.lr, recipe.schedule)


def rates_in_words(begun: int, recipe: Recipe, schedule: MegatronSchedule | None) -> str:
    """The rates of a run that begins after step `begun`, at its ends and where the recipe's schedule turns between
    them, for the user: `5.00e-07 in step 1, 1.00e-05 in step 20, 1.00e-06 in step 1000`."""
    steps, rates = recipe.train.steps, recipe.schedule
    turns = {rates.warmup_steps, steps - rates.decay_steps if rates.kind == "wsd" else steps} if not schedule else ()
    shown = sorted({begun + 1, steps, *(step for step in turns if begun < step < steps)})
    return ", ".join(f"{rate_of_update(step, recipe, schedule):.2e} in step {step}" for step in shown)


def misfit(recipe: Recipe) -> str:
    """In words, why the recipe's warm-up or decay does not fit its number of steps; empty if both do."""
    rates, steps, peak = recipe.schedule, recipe.train.steps, recipe.optimizer.lr
    if rates.warmup_steps >= steps:
        last = learning_rate(steps, steps, peak, rates)
        return (
            f"schedule.warmup_steps {rates.warmup_steps} is not below train.steps {steps}: the rate only rises, to "
            f"{last:.2e} in the last step, where optimizer.lr is {peak:.2e}"
        )
    if rates.kind == "wsd" and rates.warmup_steps + rates.decay_steps > steps:
        return (
            f"schedule.warmup_steps {rates.warmup_steps} and schedule.decay_steps {rates.decay_steps} are together "
            f"more than train.steps {steps}: the rate drops where the warm-up ends"
        )
    return ""


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """The learning rate of update `step`, counted from 1, in a run of `steps` updates."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = schedule.min_ratio
    match schedule.kind:
        case "constant":
            return peak
        case "cosine":
            done = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        case "wsd":
            done = min(1.0, max(0.0, 1 - (steps - step) / max(1, schedule.decay_steps)))
            return peak * (1 - (1 - floor) * done)
