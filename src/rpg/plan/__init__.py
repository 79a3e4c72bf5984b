"""``rpg train --dry-run``: what a run would need and take, before anything is loaded."""
