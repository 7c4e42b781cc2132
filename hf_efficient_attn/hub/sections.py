"""What the template of a card is filled with."""

import dataclasses
import re
from typing import Any

from hf_efficient_attn.hub.facts import AGREEMENTS, TASKS, Benchmark, Facts
from hf_efficient_attn.hub.markdown import Raw, code, escape, shell, table, words
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, method_info
from hf_efficient_attn.models import auto_class, model_type

# Stands in the examples until the checkpoint has a name on the hub.
PLACEHOLDER = "ORG/NAME"

# By the end of the architecture's name, which Transformers keeps to; the first that fits.
PIPELINES = (
    ("ForMaskedLM", "fill-mask", 'pipe(f"Paris is the {pipe.tokenizer.mask_token} of France.")'),
    ("ForCausalLM", "text-generation", 'pipe("Once upon a time", max_new_tokens=20)'),
    ("LMHeadModel", "text-generation", 'pipe("Once upon a time", max_new_tokens=20)'),
    ("ForImageClassification", "image-classification", 'pipe("image.jpg")'),
    ("ForSequenceClassification", "text-classification", 'pipe("A sentence.")'),
    ("ForTokenClassification", "token-classification", 'pipe("A sentence.")'),
    ("ForQuestionAnswering", "question-answering", 'pipe(question="Who wrote it?", context="She wrote it.")'),
)
IMAGE_MODELS = ("ViT", "T2TViT", "DeiT", "Beit", "Swin", "Dinov2")
MEANINGS = dict(
    zip(
        AGREEMENTS,
        (
            "Agreement: mean cosine of the embeddings with those of exact attention (1: the same).",
            "Agreement: perplexity over that of exact attention (1: the same, above 1: worse).",
            "Agreement: share of inputs with the same first answer as by exact attention (1: all).",
        ),
        strict=True,
    )
)


def pipeline_task(facts: Facts) -> str | None:
    """The pipeline that fits the architecture, None where its name does not say."""
    return next((task for task, _ in _pipelines(facts)), None)


def _pipelines(facts: Facts):
    name = facts.architecture or ""
    for ending, task, call in PIPELINES:
        if name.endswith(ending):
            yield task, call
    if name.endswith("Model") and name != "BigGANModel":
        image = name.startswith(IMAGE_MODELS)
        yield ("image-feature-extraction", 'pipe("image.jpg")') if image else ("feature-extraction", 'pipe("A text.")')


def refusal(method: str, kind: str | None = None) -> str:
    """How the error of Transformers without the plugin begins (tests/test_strangers.py provokes it).

    Args:
        kind: the model type, of a model of ours.
    """
    if kind is not None:
        return (
            f"The checkpoint you are trying to load has model type `{kind}` but Transformers does not recognize this "
            "architecture."
        )
    return f'Specified `attn_implementation="{method}"` is not supported.'


def context(facts: Facts) -> dict[str, Any]:
    """Everything that the template names; texts that are not `Raw` are escaped when they are written."""
    name = facts.choices[0][1].method if facts.choices else "sdpa"
    methods = [_method(where, choice, entry, facts) for where, choice in facts.choices for entry in choice.entries]
    infos = [method_info(method) for method in facts.methods]
    base, load = facts.base_model, auto_class(facts.architecture or "") or facts.architecture or "AutoModel"
    kind = model_type(facts.architecture or "")
    if base is not None:
        origin = Raw(f"[{escape(base)}](https://huggingface.co/{base})")
    else:
        origin = facts.base_name or Raw("A Transformers model")
    title = " and ".join(info.title for info in infos) or "exact attention"
    return {
        "name": Raw(name),
        "title": f"{facts.base_name or facts.architecture or 'Model'} with {title}",
        "origin": origin,
        "attention": words(facts.methods),
        "learned": words(facts.learned) if all(map(str.isidentifier, facts.learned)) else ", ".join(facts.learned),
        "load": Raw(f'from transformers import {load}\n\nmodel = {load}.from_pretrained("{PLACEHOLDER}")'),
        "pipeline": next(
            (Raw(f'pipe = pipeline("{t}", model="{PLACEHOLDER}")\n{c}') for t, c in _pipelines(facts)), None
        ),
        "sentence_transformers": facts.sentence_transformers,
        "ours": kind is not None,
        "refusal": Raw(f"ValueError: {refusal(name, kind)}{'' if kind else ' The only possible arguments are'} ..."),
        "methods": methods,
        "benchmark": None if facts.benchmark is None else _measured(facts.benchmark, facts.picture),
        "limits": _limits(facts, infos),
        "command": _command(facts),
        "version": facts.version,
        "license": facts.license,
    }


def _method(where: str, choice: EfficientAttentionConfig, entry, facts: Facts) -> dict[str, Any]:
    # A model of ours has attention beside its numbered layers.
    count = None if model_type(facts.architecture or "") else facts.layers
    info, of = method_info(entry.config.method), "" if count is None else f" of {count}"
    numbered = any(isinstance(layer, int) for layer in entry.layers or ())
    layers = f"{ranges(entry.layers)}{' (the first is 0)' * numbered}{of}" if entry.layers is not None else f"all{of}"
    if len(choice.entries) > 1:
        exact = [layer for layer in range(count or 0) if choice.for_layer(layer) is None]
        layers += f"; exact: {ranges(exact)}" if exact else ""
    elif entry.layers is not None:
        layers += "; the others are exact"
    values = [
        (code(spec.name), getattr(entry.config, spec.name), spec.default, spec.metadata.get("help") or "")
        for spec in dataclasses.fields(entry.config)
    ]
    return {
        "name": code(info.name),
        "title": info.title,
        "paper": info.paper,
        "summary": info.summary,
        "layers": f"{layers}, in the part {where}" if where else layers,
        "hyperparameters": table(("hyperparameter", "value", "default", "what it is"), values) if values else None,
    }


def _measured(benchmark: Benchmark, picture: bool) -> dict[str, Any]:
    forms = (
        ("seconds", "seconds", "{:.4g}"),
        ("speed-up", "speed_up", "{:.2f}x"),
        ("error", "error", "{:.4f}"),
        ("agreement", "agreement", "{:.4f}"),
        ("peak memory, MiB", "peak_memory_mib", "{:.0f}"),
    )
    rows = []
    for row in benchmark.measurements:
        numbers = ((form, getattr(row, key)) for _, key, form in forms)
        cells = ["" if value is None else form.format(value) for form, value in numbers]
        rows.append((row.length, row.batch, row.attention, *cells))
    machine = "; ".join(f"{key} {value}" for key, value in benchmark.machine.items())
    lengths = [row.length for row in benchmark.measurements]
    pays = [
        f"From {start} tokens on {label} is faster than exact attention."
        if start is not None
        else f"Up to {max(lengths, default=0)} tokens {label} was not faster than exact attention."
        for label, start in benchmark.pays_from.items()
        if label != EXACT
    ]
    generated = benchmark.data == "generated"
    data = "generated input" if generated else f"{benchmark.data}"
    return {
        "setting": f"By hf-efficient-attn benchmark, task {TASKS[benchmark.task]}, on {benchmark.rows} rows of {data}. "
        f"Machine: {machine}.",
        "meaning": Raw(
            "Speed-up is over exact attention (`sdpa`) at the same length in the same run. Error: relative error of "
            "single layers on the inputs of the exact model, mean over the layers. " + MEANINGS[benchmark.agreement]
        ),
        "table": table(("tokens", "batch", "attention", *(title for title, *_ in forms)), rows),
        "pays": [*pays, *benchmark.notes],
        "picture": picture,
        "foreign": not any(row.own for row in benchmark.measurements),
    }


def _limits(facts: Facts, infos) -> list[Any]:
    """What the registration of the methods and the checkpoint itself say."""
    lines: list[Any] = []
    for info in infos:
        exact = re.search(r"Up to [^.]*?exact\b", " ".join((info.config_class.__doc__ or "").split()))
        if exact:
            lines.append(
                f"{info.title}: {_lower(exact[0])}; beyond that it is an approximation of the original's attention."
            )
        else:
            lines.append(f"{info.title}: at no length is the output promised to be that of the original's attention.")
        if not info.causal:
            lines.append(f"{info.title} has no causal form, so that decoders cannot be converted to it.")
    if facts.learned:
        lines.append(
            "The parameters that the attention learns start from values that need training: fine-tune before use, "
            "unless that was done already."
        )
    if facts.max_length is not None:
        lines.append(
            f"The position table was extended to {facts.max_length} tokens without training: the model takes them, "
            "and was not trained to understand them."
        )
    lines.append("Short sequences gain nothing, and can be slower than by exact attention.")
    lines.append("Attention weights (output_attentions), packed sequences, 4-D masks and static caches are refused.")
    lines.append("Biases and limits of the original model hold here too.")
    return lines


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _command(facts: Facts) -> Raw | None:
    """The call of `convert` that gives this checkpoint; None where one call cannot say it (mixes, composite models)."""
    source = facts.base_model or facts.base_name
    if len(facts.choices) != 1 or facts.choices[0][0] or len(facts.choices[0][1].entries) != 1 or not source:
        return None
    choice: EfficientAttentionConfig = facts.choices[0][1]
    config, layers = choice.entries[0].config, choice.entries[0].layers
    parts = ["hf-efficient-attn", "convert", source, "--method", config.method]
    for key, value in _changed(config).items():
        parts += ["--set", f"{key}={value}"]
    if layers is not None:
        parts += ["--layers", ranges(layers)]
    if facts.max_length is not None:
        parts += ["--max-length", str(facts.max_length)]
    return shell(*parts, "-o", "OUT")


def _changed(config: MethodConfig) -> dict[str, Any]:
    values = {spec.name: (getattr(config, spec.name), spec.default) for spec in dataclasses.fields(config)}
    return {key: value for key, (value, default) in values.items() if value != default}
