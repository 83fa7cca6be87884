"""Measures, for any optimizer, how much of each step reaches the stored weights and states."""
