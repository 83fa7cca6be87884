"""What an optimizer keeps for each parameter: created, saved, loaded and converted."""
