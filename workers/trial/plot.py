"""The plot of a trial: the time to first token over time, a line for each phase, as PNG and SVG.

Drawn with matplotlib, which is not installed with llmq: `plotted` says where it is not there.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from llmq.workers.trial.figures import WINDOW_S, windows
from llmq.workers.trial.phase import Phase

#: What to type where there is no matplotlib.
HOW_TO_GET = "pip install 'llmq-streams[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is here."""
    return importlib.util.find_spec("matplotlib") is not None


def plotted(phases: Sequence[Phase], title: str, stem: Path) -> list[Path]:
    """Draw the phases into `stem`.png and `stem`.svg; return the files. Needs matplotlib (`can_plot`)."""
    # Its own canvas: pyplot would take the user's display, and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for phase in phases:
        seen = [(at, seconds) for at, seconds in phase.firsts if seconds is not None]
        line = [(at, p95) for at, p95 in windows(seen) if math.isfinite(p95)]
        axes.plot(
            [at + WINDOW_S / 2 for at, _ in line], [1000 * p95 for _, p95 in line], label=phase.name, linewidth=1.6
        )
    objective = next((phase.objective_s for phase in reversed(phases) if phase.objective_s is not None), None)
    if objective is not None:
        axes.axhline(1000 * objective, color="grey", linestyle=":", linewidth=1, label="objective")
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"time to first token, p95 of {WINDOW_S:g} s, ms")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files
