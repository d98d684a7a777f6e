"""A plugin of pytest: with --complete, which `make test` gives, a test that is skipped fails, but for reasons listed here."""

from collections.abc import Generator

import pytest

MAY_BE_MISSING = ("torchao", "bitsandbytes", "mlflow", "trackio", "Chromium", "there is a CUDA device")
"""Words of the reasons for which tests may be skipped with --complete.

torchao and bitsandbytes are compared with where they are installed; their numbers are also in tests/oracles.py and
tests/fixtures. The two trackers bring a web server each. Chromium is a package of the system. Some errors need a machine
without a CUDA device. All else is in the extra `test`, or comes with Linux, and must be there.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --complete, which `make test` gives."""
    parser.addoption("--complete", action="store_true", help="fail a test that is skipped for anything but MAY_BE_MISSING")


def unexpected_skip(config: pytest.Config, report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the reason of a skip that --complete does not allow, or ""."""
    if not report.skipped or hasattr(report, "wasxfail") or not config.getoption("complete"):
        return ""
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return "" if any(word in reason for word in MAY_BE_MISSING) else reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped unexpectedly."""
    report = yield
    if reason := unexpected_skip(item.config, report):
        report.outcome, report.longrepr = "failed", f"--complete, and the test was skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that is skipped unexpectedly."""
    report = yield
    if reason := unexpected_skip(collector.config, report):
        report.outcome, report.longrepr = "failed", f"--complete, and the file was skipped: {reason}"
    return report
