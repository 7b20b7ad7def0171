"""A page about a run that can be mailed around: one HTML file, its plots inside.

Letters: L layer, E expert.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt

from lingvo_moe.tasks.mt.scoring import GROUPS, EvalReport

_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: left }
tr:nth-child(even) { background: #f4f4f4 } td.n { text-align: right } img { max-width: 100% }
"""


def html_report(
    title: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    trained: EvalReport,
    untrained: EvalReport,
    samples: Sequence[tuple[str, str, str, str]],
) -> str:
    """The page.

    Args:
        title: its heading.
        settings: what to tell of the run, in order.
        rows: of `summaries.read_metrics`.
        trained, untrained: the scores of the same lines.
        samples: (language, source, translation, reference).
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        table(["", ""], [[name, _text(value)] for name, value in settings.items()]),
        "<h2>Scores</h2>",
        table(
            ["languages", "BLEU", "untrained", "chrF", "untrained"], group_rows(trained, untrained)
        ),
        image(plot_scores(trained, untrained), "chrF of each language"),
        "<p>" + "<br>".join(html.escape(s) for s in trained.signatures.values()) + "</p>",
        "<h2>Training</h2>",
        image(plot_loss(rows), "loss by step"),
        "<h2>Where tokens went</h2>",
        image(plot_expert_load(rows), "load of each expert by layer"),
        "<h2>Translations</h2>",
        table(["", "source", "translation", "reference"], samples),
    ]
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page, self-contained, of parts that are HTML."""
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def group_rows(trained: EvalReport, untrained: EvalReport) -> list[list[str]]:
    """A row for each resource group and one for all: name, BLEU and chrF, each beside the untrained
    model's."""
    out = []
    for group in (*GROUPS, ""):
        mean, before = trained.Average(group), untrained.Average(group)
        if not mean["languages"]:
            continue
        name = f"{group or 'all'} ({mean['languages']} languages)"
        scores = [x[kind] for kind in ("bleu", "chrf") for x in (mean, before)]
        out.append([name, *(f"{score:.1f}" for score in scores)])
    return out


def plot_loss(rows: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """The training loss and what it is made of, by step."""
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    steps = [row["step"] for row in rows]
    for name, label in (
        ("loss", "loss (smoothed labels, auxiliary loss)"),
        ("nll", "negative log-likelihood"),
    ):
        axes.plot(steps, [row[name] for row in rows], label=label)
    axes.set(xlabel="step", ylabel="nats a token")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def plot_expert_load(rows: Sequence[Mapping[str, Any]]) -> plt.Figure:
    """Each expert's share of its layer's slots over the last tenth of the run, 1.0 being an even
    share."""
    last = rows[-max(len(rows) // 10, 1) :]
    stacks = [name for name in ("encoder", "decoder") if f"moe/{name}/expert_load" in last[-1]]
    figure, all_axes = plt.subplots(
        len(stacks) or 1, squeeze=False, figsize=(8, 2.2 * (len(stacks) or 1)), layout="constrained"
    )
    for axes, name in zip(all_axes[:, 0], stacks, strict=False):
        load_LE = np.mean([row[f"moe/{name}/expert_load"] for row in last], axis=0)
        shares = load_LE * load_LE.shape[1]
        image = axes.imshow(shares, aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
        axes.set(xlabel="expert", ylabel=f"{name}\nMoE layer", yticks=range(len(load_LE)))
        figure.colorbar(image, ax=axes)
    return figure


def plot_scores(trained: EvalReport, untrained: EvalReport) -> plt.Figure:
    """chrF of each language, from the one with the most training pairs to the one with the
    fewest."""
    names = sorted(trained.languages, key=lambda lang: -trained.languages[lang].train_pairs)
    figure, axes = plt.subplots(figsize=(max(8, 0.14 * len(names)), 3.5), layout="constrained")
    axes.bar(names, [trained.languages[lang].chrf for lang in names], label="trained")
    before = [untrained.languages[lang].chrf for lang in names]
    axes.plot(names, before, "k_", markersize=5, label="untrained")
    axes.set(ylabel="chrF", xlim=(-1, len(names)))
    axes.tick_params(axis="x", rotation=90, labelsize=6)
    axes.legend()
    return figure


def png(figure: plt.Figure) -> bytes:
    """The figure as a picture file; the figure is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def image(figure: plt.Figure, alt: str) -> str:
    """The figure as an HTML image, its pixels inside."""
    data = base64.b64encode(png(figure)).decode()
    return f"<img alt='{html.escape(alt)}' src='data:image/png;base64,{data}'>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts, with a line of headings unless all are empty."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table>{row(head, 'th') if any(head) else ''}{body}</table>"


def _text(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
