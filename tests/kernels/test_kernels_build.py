"""Every kernel compiles for an H200, and for Ada, on a machine without a GPU."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dither

KERNELS = Path(dither.__file__).parent / "ops" / "triton"


def launched(folder: Path) -> set[str]:
    """The names of the kernels: functions for Triton to compile that are not helpers, whose names end otherwise."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(_decorator, node.decorator_list):
                found.add(node.name)
    return {name for name in found if name.endswith("_kernel")}


def _decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


VARIANTS = [
    pytest.param(["--first"], id="first variant"),
    pytest.param(["--first", "--ada"], id="first variant, sm_89"),
    pytest.param([], id="all variants", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("options", VARIANTS)
def test_every_kernel_compiles(options):
    # The interpreter, which the other tests use, would compile nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(KERNELS.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")]))
    script = Path(__file__).parent / "compile_kernels.py"
    result = subprocess.run([sys.executable, str(script), *options], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    counts = dict(re.findall(r"^compiled (\w+): (\d+)$", result.stdout, flags=re.MULTILINE))
    wanted = launched(KERNELS)
    assert len(wanted) >= 6
    assert wanted == {name for name, count in counts.items() if int(count) > 0}
