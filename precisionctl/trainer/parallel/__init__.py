"""The processes that train together, and what each has of the model."""
