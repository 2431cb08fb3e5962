"""What every room needs to know of a target and of the libraries that run it."""
