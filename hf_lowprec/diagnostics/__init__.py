"""The cost of training in low precision, and faults in it: memory, the precision report, probes of layers."""
