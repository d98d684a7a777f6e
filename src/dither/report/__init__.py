"""Write HTML reports about runs from their folders alone: see docs/reports.md."""

from dither.report.figures import line_images as line_images
from dither.report.page import Report as Report
from dither.report.page import write as write
from dither.report.run_folder import RunFolder as RunFolder
from dither.report.run_folder import read as read
from dither.report.run_folder import read_all as read_all
