"""How a response is scored: parts and weights, functions of the user, their processes and limits.

A reward function is called in one place, ``Caller`` (calling.py): in this process if it is trusted, else in a worker.
On the way there: ``Scorer.score`` (scoring.py) hands calls to ``WorkerProcess.send`` (worker_process.py), and in the
fresh interpreter at the other end ``work`` (worker.py) makes them, beside a guard that kills what is left (guard.py).
Nothing is imported here: a worker starts with as little as it can.
"""
