"""Samples of earlier policies: responses under way, groups that serve again, what they are worth, which prompts to ask.

Three policies take part (docs/off-policy.md). Each token was drawn from the *behaviour* policy, whose log-probability
the engine wrote down. The clip is around *old*, the KL is to the *anchor*. In ``rpg train`` old is the behaviour
policy, unless old log-probabilities are recomputed: then it is the policy at the start of the step, and the weight
old/behaviour goes on top.
"""
