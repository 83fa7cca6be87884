"""What a run measures, prints, writes to its metrics file and sends to trackers."""
