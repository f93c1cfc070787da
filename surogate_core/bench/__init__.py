"""Measuring: training steps of real shapes with random weights, kernel by kernel, beside ceilings of the same process."""
