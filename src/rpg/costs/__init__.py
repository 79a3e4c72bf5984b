"""Memory, operations and seconds, counted instead of measured: for plans and benches."""
