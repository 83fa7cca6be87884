"""What training in low precision costs and where it goes wrong: memory, the precision report, probes of layers."""
