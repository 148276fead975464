"""Recipe: [precision] [train] [data] [optimizer] [schedule] [parallel] [guard] [tracking], what a run does, from one
strict TOML file. Every key has a default, so a file says only what it changes.
"""

from precisionctl.recipe.load import bundled_recipes, find_recipe, load_recipe, recipe_of
from precisionctl.recipe.sections import (
    Data,
    GuardSettings,
    Optimizer,
    ParallelSettings,
    Recipe,
    Schedule,
    Share,
    Tracking,
    Train,
)

__all__ = [
    "Data",
    "GuardSettings",
    "Optimizer",
    "ParallelSettings",
    "Recipe",
    "Schedule",
    "Share",
    "Tracking",
    "Train",
    "bundled_recipes",
    "find_recipe",
    "load_recipe",
    "recipe_of",
]
