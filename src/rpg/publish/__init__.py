"""A model as others get it: its card, and its way to the hub."""
