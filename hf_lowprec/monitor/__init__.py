"""Measures, for any optimizer, how much of each step the stored weights and states take in."""
