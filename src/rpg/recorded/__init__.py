"""One optimiser step's batch as a file, which any trainer can write and ``rpg replay`` reads."""
