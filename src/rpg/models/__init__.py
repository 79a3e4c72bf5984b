"""The base model that comes with the package: a Llama of a million parameters (scripts/make_base_model.py)."""

from pathlib import Path

BUILTIN = Path(__file__).parent / "builtin"
