"""``rpg bench``: the parts of the system on this machine, each beside its peers and its counted floor, in one run.

``suite.py`` runs the sections in their order, a file each: ``rollout.py``, ``logp.py``, ``train.py``, ``whole.py`` and
``scaling.py``. They work on made-up models and prompts (``synthetic.py``), measure (``timing.py``), count
(``costs/operations.py``) and fill tables (``table.py``). ``step.py`` takes the whole step, with rpg and with TRL.
"""
