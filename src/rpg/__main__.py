"""``python -m rpg …``, and ``torchrun --nproc-per-node 8 -m rpg train …``: the command ``rpg``."""

from __future__ import annotations

import sys

from rpg.cli import main

if __name__ == "__main__":
    sys.exit(main())
