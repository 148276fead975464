"""Plan the commands that write a checkpoint: from a Request to a PlannedCommand."""
