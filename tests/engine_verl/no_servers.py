"""verl's trainers where no sampler runs: importing this lets them be imported without what its servers need.

verl[verl-core] and vLLM bring these. Here nothing of them is called.
"""

import importlib.util
import sys
import types

for name in ("cachetools", "fastapi", "uvicorn"):
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        sys.modules[name] = module
