"""A model answers a prompt of yours."""
