"""What services show to Prometheus, and what the dashboard and the alerts read of it."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from headrace.net.credentials import Credentials

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"


def pages(said: str) -> dict[str, str]:
    """The services that are ready and their addresses, from what `headrace up` said."""
    return dict(re.findall(r"^([\w-]+): ready \((https?://[^)]+)\)$", said, re.MULTILINE))


def reader_token(run: Path) -> str:
    return Credentials(run / "credentials").token("reader")


def scrape(address: str, token: str) -> str:
    request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def families(exposed: str) -> set[str]:
    """The metrics of a page, whether or not they have values yet."""
    return set(re.findall(r"^# TYPE (\w+) ", exposed, re.MULTILINE))


def panels() -> list[dict[str, Any]]:
    """The dashboard's charts."""
    board = json.loads((OBSERVABILITY / "grafana" / "headrace.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """What is asked of Prometheus, by the chart or the alert that asks."""
    charts = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    return charts | {rule["alert"]: rule["expr"] for rule in alerts()}


def names_in(expression: str) -> set[str]:
    """The families whose values an expression reads."""
    return {re.sub("_bucket$", "", name) for name in re.findall(r"\bheadrace_\w+", expression)}
