"""Recipe: what a run does, from one TOML file with the sections [precision], [train], [data], [optimizer], [schedule],
[router], [parallel], [guard] and [tracking]. Unknown keys are errors. Every key has a default, so a file has only what
differs.
"""

from precisionctl.recipe.load import bundled_recipes, find_recipe, flat, load_recipe, read_override, recipe_of
from precisionctl.recipe.sections import (
    MUON_KEYS,
    Data,
    GuardSettings,
    Optimizer,
    ParallelSettings,
    Recipe,
    RouterSettings,
    Schedule,
    Share,
    Tracking,
    Train,
)

__all__ = [
    "MUON_KEYS",
    "Data",
    "GuardSettings",
    "Optimizer",
    "ParallelSettings",
    "Recipe",
    "RouterSettings",
    "Schedule",
    "Share",
    "Tracking",
    "Train",
    "bundled_recipes",
    "find_recipe",
    "flat",
    "load_recipe",
    "read_override",
    "recipe_of",
]
