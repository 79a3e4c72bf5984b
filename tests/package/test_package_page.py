"""The README as a package page: without an address no link, with one every link absolute."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = """\
[a](docs/a.md#b), [`code`](x.py), [here](#there), [web](https://x.org/y)

![a picture](docs/a.svg)

```sh
[a](b)
```
"""
ABSOLUTE = """\
[a](https://h.org/o/r/blob/HEAD/docs/a.md#b), [`code`](https://h.org/o/r/blob/HEAD/x.py), \
[here](https://h.org/o/r#there), [web](https://x.org/y)

![a picture](https://h.org/o/r/raw/HEAD/docs/a.svg)

```sh
[a](b)
```
"""
NO_LINK = "a, `code`, here, [web](https://x.org/y)\n\n```sh\n[a](b)\n```\n"


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("package_page", ROOT / "scripts" / "package_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page


def test_links_of_a_package_page(page):
    assert page(TEXT, "https://h.org/o/r") == ABSOLUTE
    assert page(TEXT, None) == NO_LINK


def test_of_the_readme_every_link_leads_somewhere(page):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"\]\((?!https?:)[^)]*\)"
    assert len(re.findall(relative, text)) > 30
    for address in (None, "https://h.org/o/r"):
        assert not re.findall(relative, page(text, address))
