"""The report of `dither doctor`: versions, devices, matrix products, the self-test, and advice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dither.advice.machine import advice_here
from dither.advice.recommendation import Advice
from dither.devices import describe
from dither.doctor.machine import Device, best_device, devices
from dither.doctor.native_units import UnitsCheck, units_checks
from dither.doctor.self_test import ELEMENTS, KNOWN_ANSWERS, Check, SelfTest, run_self_test
from dither.doctor.torch_products import Product, products
from dither.engines import TRIED
from dither.errors import UserError
from dither.formats import TABLE
from dither.tables import print_table
from dither.versions import versions

SMALLEST = 512
"""The fewest elements that hold all the special rows of `sample`."""


@dataclass(frozen=True)
class Report:
    """Everything that `dither doctor` prints."""

    versions: tuple[tuple[str, str], ...]
    devices: tuple[Device, ...]
    products_on: str
    """The device on which the products were tried."""
    products: tuple[Product, ...]
    self_test: SelfTest
    units: tuple[UnitsCheck, ...] = ()
    """Empty without a GPU."""
    advice: Advice = Advice((), ())  # noqa: RUF009 (frozen)
    """Recommended precisions for this machine."""

    @property
    def verified(self) -> tuple[str, ...]:
        """The native units with no differing bit."""
        return tuple(check.name for check in self.units if check.passed)

    @property
    def exit_code(self) -> int:
        """0 when all bits agree, 1 when any differ."""
        return 0 if self.self_test.passed else 1


def examine(elements: int = ELEMENTS) -> Report:
    """Examine and test this machine, with `elements` elements per cast."""
    if elements < SMALLEST:
        raise UserError(f"The self-test takes {SMALLEST} elements per cast or more, not {elements}.")
    on = best_device()
    # The products come last: one that crashes the GPU must not affect the self-test.
    tested = run_self_test(elements)
    units = units_checks(on) if on == "cuda" else ()
    return Report(versions(), devices(), on, products(on), tested, units, advice_here())


def print_report(report: Report) -> None:
    """Print the whole report."""
    print_table("Versions", ("name", "version"), report.versions)
    print()
    print_table(
        "Devices",
        ("name", "model", "capability", "memory"),
        [(d.name, d.model, d.capability or "-", f"{d.memory / 2**30:.1f} GiB") for d in report.devices],
        right=[3],
    )
    print()
    print_table(
        f"Matrix products that torch runs on {report.products_on}",
        ("product", "runs", "note"),
        [(p.name, "yes" if p.runs else "no", p.note) for p in report.products],
    )
    if report.products_on == "cpu":
        print("  On a CPU this shows what can be computed, not what is fast.")
    print()
    if report.units:
        _print_units(report)
    _print_self_test(report.self_test)
    if report.advice.rows:
        print()
        print_advice(report.advice)


def print_advice(advice: Advice) -> None:
    """Print the precisions recommended for this machine, and the reasons."""
    header = ("device", "model", "use", "tokens per pass", "GiB")
    print_table("Advice (`dither memory MODEL` shows more)", header, advice.rows, right=[3, 4])
    for note in advice.notes:
        print(f"  {note}")


def _print_units(report: Report) -> None:
    here = describe(torch.device(report.products_on))
    known = () if here is None else TRIED.get(here.capability, ())
    print_table(
        f"Native matrix units of {report.products_on} against the reference",
        ("units", "correct", "note", "used"),
        [(u.name, "yes" if u.passed else "no", u.note, _when_used(u, u.name in known)) for u in report.units],
    )
    print(
        "  `dither doctor --engines FILE` records those that are correct; convert(engines=FILE) and precision.engines use them."
    )
    print()


def _when_used(units: UnitsCheck, known: bool) -> str:
    return "always" if known else "if recorded" if units.passed else "no"


def _print_self_test(test: SelfTest) -> None:
    names = ("random bits", *TABLE)
    groups = {name: [check for check in test.checks if check.group == name] for name in names}
    groups["total"] = list(test.checks)
    rows = []
    for name, members in groups.items():
        if members:
            elements = sum(check.elements for check in members)
            counts = (_count(members, "kernel"), _count(members, "devices"))
            rows.append((name, str(len(members)), f"{elements:,}", *counts))
    print_table(
        "Self-test: differing bits",
        ("format", "operations", "elements", "kernel against reference", "CPU against GPU"),
        rows,
        right=[1, 2, 3, 4],
    )
    for check in test.checks:
        if check.kernel or check.devices:
            counts = (_count([check], "kernel"), _count([check], "devices"))
            print(f"  DIFFERS: {check.what}: kernel against reference {counts[0]}, CPU against GPU {counts[1]}")
    print(f"  Kernels: {test.kernels}.")
    print(f"  Devices: {test.devices}.")
    print(f"  Philox4x32-10: {test.wrong_answers or 'none'} of the {len(KNOWN_ANSWERS)} known answers wrong.")
    if test.failure:
        print(f"FAILED: {test.failure}")
    elif not test.passed:
        print(f"FAILED: {test.differing} bits differ.")
    elif all(check.kernel is None and check.devices is None for check in test.checks):
        print("Nothing is wrong, but no kernel and no second device could be compared here.")
    else:
        print("All bits agree.")


def _count(checks: Sequence[Check], which: str) -> str:
    """Return the sum of one comparison as text, or "not run"."""
    counts = [getattr(check, which) for check in checks]
    return "not run" if not counts or None in counts else f"{sum(counts):,}"


def run(elements: int = ELEMENTS, engines: str | None = None) -> int:
    """Examine, print, and return the exit code: 0 when all bits agree, 1 when any differ.

    Args:
        elements: The number of elements per cast of the self-test.
        engines: A file in which to record the native units that passed, for this GPU and these versions.
    """
    if engines is not None and best_device() == "cpu":
        raise UserError("--engines records the native units of a GPU, and torch finds no GPU here.")
    report = examine(elements)
    print_report(report)
    if engines is not None:
        record_units(report, engines)
    return report.exit_code


def record_units(report: Report, path: str) -> None:
    """Write the native units that passed to a file, with the machine for which they are valid."""
    here = describe(torch.device(report.products_on), report.verified)
    assert here is not None
    try:
        here.save(path)
    except OSError as error:
        raise UserError(f"{path!r} cannot be written: {error}.") from None
    print(f"Recorded in {path}: {', '.join(here.engines) or 'no native units'}.")
