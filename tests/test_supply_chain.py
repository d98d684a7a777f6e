"""The page about dependencies says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_and_pyproject_have_the_same_dependencies():
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = dict(re.fullmatch(r"([\w-]+)(\S*)", each).groups() for each in given["dependencies"])
    page = (ROOT / "docs" / "supply-chain.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]+)` \| (.+) \|$", page, re.MULTILINE)
    assert {name: versions for name, versions, _ in rows} == wanted
    assert all(len(reason) > 20 for _, _, reason in rows)
    for extra in given["optional-dependencies"]:
        assert f"`{extra}`" in page


def test_there_is_a_way_to_report_a_vulnerability():
    said = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in said
    assert (ROOT / "docs" / "supply-chain.md").is_file()
