"""Check and load what a user names on the command line: a model, a dataset, a file."""
