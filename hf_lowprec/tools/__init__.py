"""The command line and what its commands do. Nothing that trains imports from here."""
