"""Pages about runs, made from their folders alone: see docs/reports.md."""

from dither.report.page import render as render
from dither.report.page import write as write
from dither.report.run_folder import Run as Run
from dither.report.run_folder import read as read
from dither.report.run_folder import read_all as read_all
