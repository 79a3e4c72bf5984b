"""Where problems come from: built in, files, the hub, generators, mixtures of these."""
