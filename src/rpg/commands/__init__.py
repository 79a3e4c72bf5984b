"""The commands of ``rpg``, a file each: an ``add_…`` for its flags and a ``run_…`` that does it."""
