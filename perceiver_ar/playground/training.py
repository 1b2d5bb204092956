"""A run in progress: loss, learning rate, throughput, and samples from its latest weights."""

from typing import Any

import gradio as gr
import pandas as pd

from perceiver_ar.metrics import read_metrics
from perceiver_ar.playground.acts import ONE_BY_ONE, Acts, Wish, told
from perceiver_ar.playground.shown import Shown

POINTS = 600
"""Most points of a curve."""
EVERY = 2.0
"""Seconds between two reads of the log."""
KEPT = 8
"""Most samples shown, the newest first."""


class Progress:
    """The progress of one run, shared by all visitors."""

    def __init__(self, shown: Shown, acts: Acts) -> None:
        self.shown, self.acts = shown, acts
        self.log = shown.run / "metrics.jsonl"
        self.read_at, self.curves = 0.0, ("No step is logged yet.", None, None, None)
        self.samples: list[str] = []
        self.sampled: int | None = None

    def look(self, seen: float) -> tuple[Any, ...]:
        """When the log was written, a summary, and three curves; no update if the log has not changed."""
        written = self.log.stat().st_mtime
        if written == seen:
            return (gr.skip(),) * 5
        if written != self.read_at:
            try:
                self.curves = _curves(read_metrics(self.shown.run), self.shown.experiment.train.steps)
                self.read_at = written
            except ValueError:  # no step yet
                pass
        return written, *self.curves

    def draw(self, seen: int | None) -> tuple[Any, ...]:
        """When the last weights were written, and all samples; draws one more if those weights are new."""
        written = self.shown.written
        if written is None or self.curves[1] is None:
            return None, "The first sample comes with the first checkpoint."
        if written != self.sampled:
            with told():
                self.samples.insert(0, f"<h4>By {self.curves[0].partition(':')[0]}</h4>{self._sample()}")
            del self.samples[KEPT:]
            self.sampled = written
        return (gr.skip(), gr.skip()) if seen == written else (written, "".join(self.samples))

    def _sample(self) -> str:
        usual = self.shown.experiment.model.latents
        wish = Wish(temperature=1.0, top_k=0, top_p=1.0, seed=0, count=200, latents=usual, samples=1)
        *_, sample = self.acts.samples(wish, None, lambda: False)
        return self.acts.view.show(sample)


def _curves(lines: list[dict[str, Any]], total: int) -> tuple[Any, ...]:
    """A summary, and tables of losses, learning rates and speeds."""
    steps = [line for line in lines if "loss" in line]
    found = [line for line in lines if "validation" in line]
    words = (
        f"Step {steps[-1]['step']:,} of {total:,}: **{steps[-1]['loss']:.4f}** nats in the last logged batch"
    )
    for line in found[-1:]:
        words += f", **{line['validation']['nats']:.4f}** in validation at step {line['step']:,}"
    rows = [(line["step"], line["loss"], "training") for line in _thinned(steps)]
    rows += [(line["step"], line["validation"]["nats"], "validation") for line in _thinned(found)]
    others = pd.DataFrame(
        [(line["step"], line["lr"], line["targets_per_second"]) for line in _thinned(steps)],
        columns=["step", "learning rate", "targets/s"],
    )
    return words + ".", pd.DataFrame(rows, columns=["step", "nats", "of"]), others, others


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most POINTS of the lines, the last among them."""
    every = max(1, -(-len(lines) // POINTS))
    return lines[::-1][::every][::-1]


def training_tab(shown: Shown, acts: Acts) -> None:
    """Fills the tab, which refreshes by itself."""
    progress = Progress(shown, acts)
    seen, drawn = gr.State(0.0), gr.State()
    summary = gr.Markdown(elem_classes="summary")
    loss = gr.LinePlot(x="step", y="nats", color="of", title="Loss", height=320)
    with gr.Row():
        rate = gr.LinePlot(x="step", y="learning rate", title="Learning rate", height=220)
        speed = gr.LinePlot(x="step", y="targets/s", title="Targets a second", height=220)
    gr.Markdown("### Samples so far")
    samples = gr.HTML(elem_classes="samples")
    hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    gr.Timer(EVERY).tick(progress.look, seen, [seen, summary, loss, rate, speed], **hidden)
    gr.Timer(2 * EVERY).tick(progress.draw, drawn, [drawn, samples], **(ONE_BY_ONE | hidden))
