"""The examples of pages and docstrings about other packages run."""

import pytest
from test_docs import MODULES, OTHERS, ROOT, check_docstrings, check_page


@pytest.mark.parametrize("page", OTHERS)
def test_examples_in_pages(page):
    check_page(ROOT / "docs" / page)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("dither.integrations")])
def test_examples_in_docstrings(name):
    check_docstrings(name)
