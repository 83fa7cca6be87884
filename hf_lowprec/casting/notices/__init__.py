"""Warnings and advice about what a cast rounds."""
