"""HTML elements. (Those of the audit's page come with torch, which a report does not need.)"""

from __future__ import annotations

from html import escape


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element; attributes are escaped, what is inside is HTML already. ``class_`` is class, ``a_b`` is a-b."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def unbroken(text: str) -> str:
    """Escaped, with numbers that stay on one line."""
    return escape(text.replace(" %", "\u00a0%").replace("–", "\u2060–\u2060"))
