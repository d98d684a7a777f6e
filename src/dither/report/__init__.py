"""Pages about runs, made from their folders alone: see docs/reports.md."""

from dither.report.load import Run as Run
from dither.report.load import read as read
from dither.report.load import read_all as read_all
from dither.report.page import render as render
from dither.report.page import write as write
