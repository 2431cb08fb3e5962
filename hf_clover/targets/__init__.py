"""What every room asks of a target and of the libraries that run it."""
