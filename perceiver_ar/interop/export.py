"""A run as a folder of the transformers library, which people without this one can load, too."""

import ast
import re
from pathlib import Path
from typing import Any

import perceiver_ar
from perceiver_ar.architectures import parameter_count
from perceiver_ar.checkpoint import write_folder
from perceiver_ar.extras import need
from perceiver_ar.metrics import whole_lines
from perceiver_ar.model import PerceiverAR
from perceiver_ar.pretrained import WEIGHTS
from perceiver_ar.run import LICENSE, copy_license, load, model_folder
from perceiver_ar.sealed import file_digest, read_sealed, write_sealed
from perceiver_ar.tasks.base import Task
from perceiver_ar.tasks.text import TextTask

CAUSAL_LM, TOKENIZER = "perceiver_ar.interop.causal_lm", "perceiver_ar.interop.tokenizer"
PIPELINES = {"text": "text-generation", "image": "unconditional-image-generation"}


def export(run: Path, out: Path, license: str | None = None) -> None:
    """Writes weights, config, tokenizer, code and a model card; the task's files, too, so that our
    commands read the folder like a run."""
    need("transformers", "hf")
    from perceiver_ar.interop.causal_lm import PerceiverARForCausalLM

    if out.exists():
        raise ValueError(f"{out} exists already: give a folder that does not.")
    model, task, _ = load(run, "cpu")
    if not isinstance(model, PerceiverAR):
        raise ValueError(f"{run} holds a {type(model).__name__}: only a PerceiverAR can be exported.")
    wrapped = PerceiverARForCausalLM.of(model)
    wrapped.config.auto_map = {
        "AutoConfig": f"{_flat(CAUSAL_LM)}.PerceiverARConfig",
        **dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), f"{_flat(CAUSAL_LM)}.PerceiverARForCausalLM"),
    }
    wrapped.generation_config.eos_token_id = wrapped.config.eos_token_id if task.ends else None

    def write(beside: Path) -> None:
        wrapped.save_pretrained(beside)
        about = read_sealed(model_folder(run) / "experiment.json")
        about |= {"data": None, "sha256": file_digest(beside / WEIGHTS)}
        write_sealed(beside / "experiment.json", about)
        for name, content in task.files().items():
            (beside / name).write_bytes(content)
        if isinstance(task, TextTask):
            _write_tokenizer(task, model.config.context, beside)
        for name, source in code([CAUSAL_LM, TOKENIZER]).items():
            (beside / name).write_text(source)
        copy_license(run, beside)
        (beside / "README.md").write_text(card(run, model, task, license or stated_license(run)))

    write_folder(out, write)


def _write_tokenizer(task: TextTask, context: int, folder: Path) -> None:
    from perceiver_ar.interop.tokenizer import PerceiverARTokenizer

    files = {name: folder / file for name, file in PerceiverARTokenizer.vocab_files_names.items()}
    given = {name: str(path) for name, path in files.items() if path.exists()}
    tokenizer = PerceiverARTokenizer(task.tokenizer, **given, model_max_length=context)
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": [f"{_flat(TOKENIZER)}.PerceiverARTokenizer", None]}
    tokenizer.save_pretrained(folder)


def code(roots: list[str]) -> dict[str, str]:
    """The modules that these need, their own files first, with imports from beside them."""
    found: dict[str, str] = {}
    left = list(roots)
    while left:
        module = left.pop()
        name = f"{_flat(module)}.py"
        if name not in found:
            path = Path(perceiver_ar.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
            source = path.read_text()
            found[name] = _beside(source)
            left += _needed(source)
    return found


def _flat(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def _needed(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "perceiver_ar":
            found += [f"perceiver_ar.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perceiver_ar."):
            found.append(str(node.module))
    return found


def _beside(source: str) -> str:
    """The same with relative imports, each spelt so that transformers sees which file it needs."""
    source = re.sub(r"from perceiver_ar(?:\.\w+)*\.(\w+) import", r"from .\1 import", source)
    return re.sub(
        r"from perceiver_ar import ([\w, ]+)",
        lambda found: "\n".join(
            [f"from . import {found[1]}"]
            + [f"from .{name} import __name__ as _{name}  # noqa" for name in found[1].split(", ")]
        ),
        source,
    )


def stated_license(run: Path) -> str:
    """The licence that the card of a model with a licence states, and unknown for all others."""
    from huggingface_hub import ModelCard

    folder = model_folder(run)
    return (
        str(ModelCard.load(folder / "README.md").data.license) if (folder / LICENSE).exists() else "unknown"
    )


def card(run: Path, model: PerceiverAR, task: Task, license: str) -> str:
    """README.md: what the hub shows, and how to use the model."""
    from huggingface_hub import EvalResult, ModelCardData

    name = run.resolve().name
    results = [
        EvalResult(
            task_type=PIPELINES.get(task.name, "other"),
            dataset_type="custom",
            dataset_name="validation",
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in _best_evaluation(run).items()
    ]
    data = ModelCardData(
        license=license,
        library_name="transformers",
        tags=["perceiver-ar", task.name],
        pipeline_tag=PIPELINES.get(task.name),
        model_name=name,
        eval_results=results or None,
    )
    use = _TEXT_USE if isinstance(task, TextTask) else _TOKENS_USE
    config = model.config
    about = _ABOUT.format(
        task=task.name,
        parameters=parameter_count(config),
        context=config.context,
        latents=config.latents,
        license=license,
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{about}\n{use}"


def _best_evaluation(run: Path) -> dict[str, Any]:
    """Figures of the evaluation whose model a run kept."""
    path = run / "metrics.jsonl"
    lines = whole_lines(path) if path.exists() else []
    evaluations = [line["validation"] for line in lines if "validation" in line]
    best = min(evaluations, key=lambda means: means["nats"], default={})
    return {name: value for name, value in best.items() if isinstance(value, float)}


_ABOUT = """A [Perceiver AR](https://arxiv.org/abs/2202.07765) of {parameters:,} parameters for the
task {task}, trained with `perceiver-ar`; experiment.json has its settings. It takes up to {context:,}
inputs and gives logits for the last {latents:,} of them. The weights' licence: {license}. The code beside
them is perceiver-ar's, Apache-2.0.
"""
_LOAD = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""
_TEXT_USE = (
    _LOAD
    + """tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))
```

With perceiver-ar installed, `import perceiver_ar.interop.transformers` and leave out trust_remote_code:
then no code of this folder is run.
"""
)
_TOKENS_USE = (
    _LOAD.replace(", AutoTokenizer", "")
    + """```

Its tokens are not text: `perceiver-ar generate FOLDER` draws samples and writes them as files.
"""
)
