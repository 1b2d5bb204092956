"""A run in progress: loss, learning rate, throughput, and samples of its weights so far."""

from typing import Any

import gradio as gr
import pandas as pd

from perceiver_ar.playground.acts import Acts, Wish
from perceiver_ar.playground.shown import Shown
from perceiver_ar.plots import read_metrics

POINTS = 600
"""Of a curve at most."""
EVERY = 2.0
"""Seconds between two looks at what was logged."""
KEPT = 8
"""Samples, the newest first."""


class Progress:
    """Of one run, as all visitors see it."""

    def __init__(self, shown: Shown, acts: Acts) -> None:
        self.shown, self.acts = shown, acts
        self.path = shown.run / "metrics.jsonl"
        self.samples: list[str] = []
        self.sampled: int | None = None

    def curves(self, seen: float) -> tuple[Any, ...]:
        """When the log was written, a summary, and three curves; nothing new where there is nothing new."""
        written = self.path.stat().st_mtime
        if written == seen:
            return (gr.skip(),) * 5
        try:
            lines = read_metrics(self.shown.run)
        except ValueError as error:  # not a step yet
            return (written, str(error), None, None, None)
        steps = [line for line in lines if "loss" in line]
        found = [line for line in lines if "validation" in line]
        last, total = steps[-1], self.shown.experiment.train.steps
        words = f"Step {last['step']:,} of {total:,}: **{last['loss']:.4f}** nats in the last logged batch"
        if found:
            words += (
                f", **{found[-1]['validation']['nats']:.4f}** in validation at step {found[-1]['step']:,}"
            )
        rows = [(line["step"], line["loss"], "training") for line in _thinned(steps)]
        rows += [(line["step"], line["validation"]["nats"], "validation") for line in _thinned(found)]
        loss = pd.DataFrame(rows, columns=["step", "nats", "of"])
        others = pd.DataFrame(
            [(line["step"], line["lr"], line["targets_per_second"]) for line in _thinned(steps)],
            columns=["step", "learning rate", "targets/s"],
        )
        return written, words + ".", loss, others, others

    def drawn(self) -> Any:
        """A sample more, once the model was written anew."""
        written = self.shown.written
        if written is None:
            return "The first sample comes with the first checkpoint."
        if written != self.sampled:
            lines = read_metrics(self.shown.run)
            self.samples.insert(0, f"<h4>About step {lines[-1]['step']:,}</h4>{self._sample()}")
            del self.samples[KEPT:]
            self.sampled = written
        return "".join(self.samples)

    def _sample(self) -> str:
        usual = self.shown.experiment.model.latents
        wish = Wish(temperature=1.0, top_k=0, top_p=1.0, seed=0, count=200, latents=usual, samples=1)
        *_, sample = self.acts.samples(wish, None, "")
        return self.acts.view.show(sample)


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many, the last among them."""
    every = max(1, -(-len(lines) // POINTS))
    return lines[::-1][::every][::-1]


def training_tab(shown: Shown, acts: Acts) -> None:
    """Looks again by itself."""
    progress = Progress(shown, acts)
    seen = gr.State(0.0)
    summary = gr.Markdown(elem_classes="summary")
    loss = gr.LinePlot(x="step", y="nats", color="of", title="Loss", height=320)
    with gr.Row():
        rate = gr.LinePlot(x="step", y="learning rate", title="Learning rate", height=220)
        speed = gr.LinePlot(x="step", y="targets/s", title="Targets a second", height=220)
    gr.Markdown("### Samples so far")
    samples = gr.HTML(elem_classes="samples")
    hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    gr.Timer(EVERY).tick(progress.curves, seen, [seen, summary, loss, rate, speed], **hidden)
    gr.Timer(2 * EVERY).tick(
        progress.drawn, None, samples, concurrency_limit=1, concurrency_id=shown.name, **hidden
    )
