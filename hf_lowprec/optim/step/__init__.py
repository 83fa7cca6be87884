"""One optimizer step: plan the parameters, compute scalars, update, store."""
