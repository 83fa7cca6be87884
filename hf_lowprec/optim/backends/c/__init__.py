"""Steps on the CPU in generated C."""
