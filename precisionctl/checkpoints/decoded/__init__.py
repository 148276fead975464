"""Codes that are read as values alone: each way to store them is a file here."""
