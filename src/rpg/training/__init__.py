"""A step of training in the order of its data, and the loop around it. Read ``Trainer.step`` in loop.py first."""
