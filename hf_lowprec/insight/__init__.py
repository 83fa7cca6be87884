"""What precision costs and does: memory, the report at the start, the share of updates that rounding lost."""
