"""``rpg bench``: the whole RL step of the built-in run beside TRL's GRPOTrainer, on this machine, in one run.

Read ``step.py`` for what is timed and ``trl_peer.py`` for how TRL is set up; ``versus.py`` lets the two take turns.
"""
