"""Warnings about what a cast rounds."""
