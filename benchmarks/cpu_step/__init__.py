"""Parts of the benchmarks of optimizer steps on the CPU."""
