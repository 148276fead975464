"""A run of `resume` that Megatron-Core trains: its model, schedules, optimizer and checkpoints, under our command."""
