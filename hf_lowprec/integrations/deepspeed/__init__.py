"""DeepSpeed ZeRO 1, 2 and 3 with our optimizers: each rank steps its partition, with the bits of one process."""
