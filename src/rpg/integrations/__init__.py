"""The same algorithm object inside other people's trainers: TRL (accelerate) and verl (Ray)."""
