"""Compares layers in 16 bits with FP64 on this machine."""
