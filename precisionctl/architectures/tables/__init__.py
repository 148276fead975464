"""One table for each family: its rows, and how its config.json says a ModelShape."""
