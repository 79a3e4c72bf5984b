"""What a run is and what it writes: settings, folder, logs, checkpoints, terminal."""
