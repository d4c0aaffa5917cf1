"""Runs: their log in one object, and their metrics as tables and charts."""

from mcore.observe.runs.run_page import draw_page
from mcore.observe.runs.slow_ranks import log_slow_ranks
from mcore.observe.runs.state import RunLog
from mcore.observe.runs.tables import Run, compare, draw_picture, show

__all__ = ["Run", "RunLog", "compare", "draw_page", "draw_picture", "log_slow_ranks", "show"]
