"""How other frameworks go on from a checkpoint: what to start them with."""
