"""Formats of training data files: one module for each, which recognises its own files. All other files are text."""
