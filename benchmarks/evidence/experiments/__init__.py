"""What is claimed, one experiment a file."""
