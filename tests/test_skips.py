"""With --complete a skipped test fails, unless tests/skips.py allows the reason."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WRONG = {
    "test_allowed.py": "import pytest\n\ndef test_peer():\n    pytest.importorskip('torchao.no_such_module')\n",
    "test_extra.py": "import pytest\n\ndef test_extra():\n    pytest.skip('transformers is not installed')\n",
    "test_file.py": "import pytest\n\npytest.importorskip('no_such_package')\n\ndef test_never():\n    pass\n",
    "test_mark.py": "import pytest\n\n@pytest.mark.skipif(True, reason='there is no Triton')\ndef test_mark():\n    pass\n",
    "test_known.py": "import pytest\n\n@pytest.mark.xfail(reason='known')\ndef test_known():\n    assert False\n",
}


@pytest.mark.parametrize("options", [[], ["--complete"]], ids=["plain", "complete"])
def test_a_skip_fails_if_the_extra_test_has_the_package(options, tmp_path):
    for name, text in WRONG.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "skips", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--continue-on-collection-errors", *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (skipped|failed|error|xfailed)", done.stdout)}
    if options:
        assert counts == {"skipped": 1, "failed": 1, "error": 2, "xfailed": 1}, done.stdout
        assert "--complete, and the file was skipped: Skipped: could not import 'no_such_package'" in done.stdout
    else:
        assert counts == {"skipped": 4, "xfailed": 1}, done.stdout
