"""``rpg export``: a recipe as a run of verl or TRL, from the same file and the same checkpoint. Nothing is approximated
silently: what an engine has no counterpart for is refused by name, or named in the files that are written."""
