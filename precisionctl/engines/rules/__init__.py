"""What engines ask of a directory of codes: each kind of rule, which an engine fills with its own texts and sources."""
