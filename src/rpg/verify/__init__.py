"""Is this answer right? ``verify(response, truth)`` never raises and never hangs; ``verdict`` also says why."""

from __future__ import annotations

from .judge import Verdict, lenient_reward, verdict, verify, verify_reward

__all__ = ["Verdict", "lenient_reward", "verdict", "verify", "verify_reward"]
