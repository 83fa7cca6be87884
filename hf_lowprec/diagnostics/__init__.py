"""Diagnostics for low-precision training: memory use, the precision report, and probes of layers."""
