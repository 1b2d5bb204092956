"""The page: a tab per run, for drawing from its model and following its training."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from perceiver_ar.playground.acts import LONGEST, ONE_BY_ONE, Acts, latents_to_try
from perceiver_ar.playground.shown import Shown
from perceiver_ar.playground.training import training_tab
from perceiver_ar.playground.views import View, view_of

LENGTHS = {"text": 300, "tokens": 300, "music": 1024, "audio": 1600}
"""Default numbers of tokens, for tasks whose documents have no fixed length."""
AT_ONCE: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}


def build(runs: list[Shown]) -> gr.Blocks:
    """Builds the page; it deletes files of visitors after about an hour."""
    with gr.Blocks(title="Perceiver AR", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown("# Perceiver AR")
        if len(runs) == 1:
            _run(runs[0])
        else:
            with gr.Tabs():
                for number, shown in enumerate(runs):
                    with gr.Tab(shown.name, id=number):
                        _run(shown)
    return page


def _run(shown: Shown) -> None:
    model = shown.experiment.model
    gr.Markdown(
        f"**{shown.name}**: {shown.experiment.task}, a context of {model.context:,} tokens, "
        f"{model.latents:,} latents, {model.layers} layers."
    )
    view = view_of(shown.task)
    acts = Acts(shown, view)
    with gr.Tabs():
        with gr.Tab("Draw"):
            _draw(shown, view, acts)
        if (shown.run / "metrics.jsonl").exists():
            with gr.Tab("Training"):
                training_tab(shown, acts)


def _draw(shown: Shown, view: View, acts: Acts) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            given, latents = view.inputs(shown.task), _latents(shown)
            with gr.Row():
                go = gr.Button("Draw", variant="primary", min_width=100, elem_classes="go")
                halt = gr.Button("Stop", variant="stop", min_width=100, elem_classes="halt")
                leave = gr.Button(elem_id=f"leave-{id(shown)}", elem_classes="leave")
            controls = _controls(shown, view)
        with gr.Column(scale=2, min_width=320):
            canvas = gr.HTML(label="Drawn", elem_classes="canvas-box", min_height=160)
            status = gr.Markdown(elem_classes="status")
            sound = gr.Audio(label="Listen", interactive=False, visible=False, buttons=["download"])
            files = gr.File(label="Download", interactive=False, visible=False, elem_classes="files")
            drawn, ticket = gr.State(), gr.State("")
            with gr.Accordion("Where the cross-attend looks", visible=shown.perceives):
                attention = gr.HTML(elem_classes="attention")
                back = gr.Slider(0, 512, 0, step=1, label="For the token that stands so far back")
            with gr.Accordion("The same model with fewer and more latents", visible=shown.perceives):
                table = gr.HTML(elem_classes="latents-table")
                compare = gr.Button("Compare", elem_classes="compare")

    # The names of parameters are part of the API that programs call.
    def draw(
        mine: str,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        seed: Any,
        count: Any,
        samples: Any,
        latents: Any,
        *prompt: Any,
    ) -> Iterator[Any]:
        yield from acts.draw(mine, (temperature, top_k, top_p, seed, count, samples, latents), prompt)

    def try_latents(mine: str, latents: float, *typed: Any) -> Iterator[str]:
        yield from acts.compare(mine, int(latents), typed)

    outputs = [canvas, status, attention, sound, files, drawn]
    named = f"draw_{shown.name}", f"compare_{shown.name}"
    drawing = go.click(acts.begin, None, ticket, **AT_ONCE).then(
        draw, [ticket, *controls, latents, *given], outputs, api_name=named[0], **ONE_BY_ONE
    )
    comparing = compare.click(acts.begin, None, ticket, **AT_ONCE).then(
        try_latents, [ticket, latents, *given], table, api_name=named[1], **ONE_BY_ONE
    )
    # A request that has begun ends by itself, and keeps what there is. After that, waiting ones leave the
    # queue: gradio can cancel them only on a click, hence the hidden button.
    leave.click(None, cancels=[drawing, comparing])
    halt.click(acts.stop, ticket, None, **AT_ONCE).then(
        None, js=f"() => document.getElementById('{leave.elem_id}').click()"
    )
    back.release(acts.look, [drawn, back], attention, api_visibility="private", **ONE_BY_ONE)


def _latents(shown: Shown) -> Any:
    tried, usual = latents_to_try(shown), shown.experiment.model.latents
    return gr.Slider(
        min(tried),
        max(tried),
        usual,
        step=1,
        label="Latents",
        info=f"trained with {usual:,}",
        elem_classes="latents",
        visible=shown.perceives and len(tried) > 1,
    )


def _controls(shown: Shown, view: View) -> list[Any]:
    """Controls for a Wish without its latents: temperature, top-k, top-p, seed, count and samples."""
    count = LENGTHS.get(shown.experiment.task)
    with gr.Row():
        temperature = gr.Slider(0, 2, 1, step=0.05, label="Temperature", info="0: the likeliest")
        seed = gr.Number(0, precision=0, minimum=0, label="Seed", info="another, another sample")
    length = gr.Slider(
        1,
        LONGEST if count is None else 4096,
        LONGEST if count is None else count,
        step=1,
        label=f"Length, {view.unit}",
        visible=count is not None,
        elem_classes="length",
    )
    with gr.Row():
        top_k = gr.Slider(0, 256, 0, step=1, label="Top-k", info="0: off")
        top_p = gr.Slider(0.05, 1, 1, step=0.01, label="Top-p", info="1: off")
    several = view.most_samples > 1
    samples = gr.Slider(
        1, max(2, view.most_samples), 1, step=1, label="Samples", visible=several, elem_classes="several"
    )
    return [temperature, top_k, top_p, seed, length, samples]
