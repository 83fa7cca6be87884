"""Reports of a run: its measurements, the precision report, the metrics file, trackers."""
