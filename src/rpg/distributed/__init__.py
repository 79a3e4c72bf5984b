"""Several processes, one run: ranks, shards of the weights, work split among them."""
