"""Examine this machine: its devices, the matrix products that it runs, and whether it computes the bits that Dither defines.

The work behind `dither doctor`. It needs only torch, so that a machine without the packages of the command line can run it:
`python -m dither.doctor`.
"""

from dither.doctor.machine import Device as Device
from dither.doctor.machine import best_device as best_device
from dither.doctor.machine import devices as devices
from dither.doctor.native_units import UNITS as UNITS
from dither.doctor.native_units import UnitsCheck as UnitsCheck
from dither.doctor.native_units import units_check as units_check
from dither.doctor.native_units import units_checks as units_checks
from dither.doctor.report import Report as Report
from dither.doctor.report import examine as examine
from dither.doctor.report import print_report as print_report
from dither.doctor.report import run as run
from dither.doctor.self_test import ELEMENTS as ELEMENTS
from dither.doctor.self_test import Check as Check
from dither.doctor.self_test import SelfTest as SelfTest
from dither.doctor.self_test import run_self_test as run_self_test
from dither.doctor.torch_products import Product as Product
from dither.doctor.torch_products import products as products
