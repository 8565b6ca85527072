"""Generate the tables of docs/metrics.md from the registry of metrics: `python scripts/generate_metrics.py [OUTPUT]`.

The output is committed, and a test checks that it is current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.run.metric_names import METRIC_SECTIONS, Metric, MetricSection

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

MARK = "<!-- What follows is generated from headrace/run/metric_names.py: run `make docs`. -->\n"


def page(written: str) -> str:
    """Return `written` up to the mark, followed by the generated tables."""
    prose, mark, _ = written.partition(MARK)
    return "\n".join([prose + mark, *map(_section, METRIC_SECTIONS)])


def _section(section: MetricSection) -> str:
    head = f"## {section.title}\n\n{section.note}\n\n| metric | unit | meaning | healthy |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(map(_row, section.metrics)) + "\n"


def _row(metric: Metric) -> str:
    cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.write_text(page(OUTPUT.read_text(encoding="utf-8")), encoding="utf-8")
