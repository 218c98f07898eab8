"""`docs/metrics.md` lists every metric that there is, and no other; alerts and dashboard name no other either."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmq.gateway.http_metrics import HttpMetrics
from llmq.scheduler.measures import Figures
from llmq.scheduler.queue_metrics import queue_families
from llmq.workers.metrics import WorkerMetrics
from tests.contract.project import ROOT
from tests.unit.test_metric_families import busy

DOCUMENT = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(llmq_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.M)
NAME = re.compile(r"llmq_\w+")


def worker_families() -> Iterator[Metric]:
    """Yield what a worker tells; of a worker that is made of nothing."""
    engine = SimpleNamespace(kind="sim")
    card = SimpleNamespace(worker_id="w1", gpu="0", engine=engine, state="ready", version="1", queue="q")
    slots = SimpleNamespace(concurrency=4, batch_limit=3, running=list, desk=SimpleNamespace(claimed_at=1.0))
    measuring = SimpleNamespace(figures=Figures, totals=dict)
    contact = SimpleNamespace(unbroken=lambda: 1.0)
    yield from WorkerMetrics(*cast(Any, (card, slots, measuring, contact))).families()


def gateway_families() -> Iterable[Metric]:
    """Return what a gateway counts itself; with one request, so that its labels are known."""
    registry = CollectorRegistry()
    metrics = HttpMetrics(cast(Any, None), registry)
    metrics._requests.labels("r", "GET", "2xx").inc()
    metrics._seconds.labels("r").observe(1)
    metrics.refused(429, "queue_full")
    return cast(Collector, registry).collect()


def row_of(family: Metric) -> str:
    """Return the row of the document that a family belongs in."""
    labels = dict.fromkeys(name for sample in family.samples for name in sample.labels)
    shown = ", ".join(f"`{name}`" for name in labels if name not in ("queue", "le"))
    return f"| `{family.name}` | {family.type} | {shown} | {family.documentation} |"


ALL = [family for family in (*queue_families("q", busy()), *worker_families(), *gateway_families())
       if family.name.startswith("llmq_")]  # fmt: skip

#: Told by a worker under its own name, and described once, for the queue.
SHARED = {family.name for family in worker_families()} & {
    family.name.replace("llmq_", "llmq_worker_", 1) for family in queue_families("q", busy())
}


def test_the_document_lists_what_there_is() -> None:
    """Name, type, labels and meaning of each, as the code has them."""
    text = DOCUMENT.read_text(encoding="utf-8")
    expected = [row_of(family) for family in ALL if family.name not in SHARED]
    assert [] == [row for row in expected if row not in text], "rows that are missing"
    assert sorted(expected) == sorted(found[0] for found in ROW.finditer(text)), "rows that are too many"


@pytest.mark.parametrize("path", ["docs/metrics.md", "deploy/alerts.yml", "deploy/grafana.json"])
def test_no_expression_names_a_metric_that_there_is_not(path: str) -> None:
    """A rule over a misspelt name never fires."""
    known = {family.name for family in ALL}
    series = known | {sample.name for family in ALL for sample in family.samples}
    named = set(NAME.findall((ROOT / path).read_text(encoding="utf-8"))) - {"llmq_", "llmq_worker_", "llmq_gateway_"}
    assert set() == named - series
    assert named


def test_the_alerts_can_be_loaded() -> None:
    """Each rule has a name, an expression with balanced brackets, a severity and a sentence for whoever is called."""
    groups = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 8
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")"), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert "llmq" in rule["annotations"]["description"], rule["alert"]
    assert len(rules) == len({rule["alert"] for rule in rules})


def test_the_dashboard_can_be_loaded() -> None:
    """Each panel has a title, a place of its own and a query."""
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len(panels) >= 9
    assert all(panel["title"] and panel["targets"][0]["expr"] for panel in panels)
    assert len(panels) == len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels})
