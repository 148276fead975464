"""Calibration: FP8 state from passes over data."""
