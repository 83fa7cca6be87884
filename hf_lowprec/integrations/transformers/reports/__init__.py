"""Reports of a run: its measurements, the precision report."""
