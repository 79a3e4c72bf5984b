"""``rpg.clip`` is ``rpg.clipping`` by its public name."""

import sys

from . import clipping

sys.modules[__name__] = clipping
