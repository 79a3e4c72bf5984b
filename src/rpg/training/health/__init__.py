"""How a run is doing: what is measured of it at every step, and the warning lights that read it."""
