"""Check and load the models, datasets and files that a user names on the command line."""
