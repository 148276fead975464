"""Files of training data: one module for each kind, which recognises its own files. What none knows is text."""
