"""Hooks that convert what goes into and comes out of modules."""
