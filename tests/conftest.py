"""What every run of the tests says at its end."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many layouts were proved: compared with one process and found equal."""
    passed = terminalreporter.stats.get("passed", [])
    proved = [report for report in passed if "test_layout_equals_one_process" in report.nodeid]
    if proved:
        models = {report.nodeid.split("[")[1].split("-")[0] for report in proved}
        terminalreporter.write_line(
            f"proved equal to one process: {len(proved)} layouts of {len(models)} models"
        )
