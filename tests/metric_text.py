"""Metrics as a monitoring system reads them: parsed, and held to the rules of the format and of naming."""

from __future__ import annotations

import re

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

UNITS = ("seconds", "bytes")

#: What a unit that is no base unit looks like.
OTHER_UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|kb|mb|kib|mib|percent)(_|$)")


class Scrape:
    """One scrape. `kinds` is the type of each family by its name; samples are asked by name and labels."""

    def __init__(self, text: str) -> None:
        families = list((parse_openmetrics if text.rstrip().endswith("# EOF") else parse_text)(text))
        self.kinds = {family.name: family.type for family in families}
        self.meanings = {family.name: family.documentation for family in families}
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the one sample that has these labels (among others)."""
        found = self.values(name, **labels)
        assert 1 == len(found), (name, labels, found)
        return found[0]

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the samples of this name that have these labels (among others)."""
        return [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def faults(self) -> list[str]:
        """Say what breaks the rules that promtool checks, and what Prometheus could not store; empty is well."""
        faults = [f"{name} says nothing" for name, meaning in self.meanings.items() if not meaning.strip()]
        faults += [f"{name} has another unit" for name in self.kinds if OTHER_UNITS.search(name)]
        faults += [f"{name} is no name" for name in self.kinds if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
        faults += [f"{name} reads as a counter" for name, kind in self.kinds.items()
                   if name.endswith("_total") and kind != "counter"]  # fmt: skip
        seen = [(s.name, *sorted(s.labels.items())) for s in self.samples]
        return faults + [f"{name} is there twice" for name in set(seen) if seen.count(name) > 1]
