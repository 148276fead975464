"""How Hugging Face directories spell FP8, both ways; one file per spelling."""
