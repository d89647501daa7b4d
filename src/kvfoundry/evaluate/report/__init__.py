"""report.html: one offline file, made from a results folder alone. `page.py` assembles it; nothing is ever fetched."""

from kvfoundry.evaluate.report.page import render_comparison, render_report

__all__ = ["render_comparison", "render_report"]
