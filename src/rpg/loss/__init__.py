"""The loss and everything in it: torch tensors in, a loss out. Imports torch and nothing else, and works alone."""
