"""``rpg bench``: the parts of the system on this machine, each beside its peers and its counted floor, in one run.

``suite.py`` has the sections in their order, a file each: ``rollout.py``, ``logp.py``, ``train.py``, ``whole.py`` and
``scaling.py``. They measure (``timing.py``), count (``counts.py``) and fill rows (``rows.py``) for ``table.py``.
The whole step runs in processes of its own (``versus.py``): ``step.py`` for rpg, ``trl_peer.py`` for TRL.
"""
