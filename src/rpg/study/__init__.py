"""Settings × seeds as runs, compared honestly: a file in, runs in a folder, one page and a verdict out."""
