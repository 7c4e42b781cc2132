"""Fine-tune, up-train or evaluate a pretrained image classifier (ViT, DeiT) with any attention method.

    python recipes/imagenet.py --model_name_or_path DEIT --train_data TRAIN --eval_data VAL --output_dir OUT
    python recipes/imagenet.py ... --attention kdeformer --set num_samples=64 --resolution 384
    python recipes/imagenet.py ... --attention longformer --set global_tokens=1 --eval_only       (without any training)
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/imagenet.py ... --preset imagenet

TRAIN and VAL are hub ids, folders or zip files: `<split>/<class>/<file>`, `<class>/<file>`, or files that begin with
WordNet numbers. Without --eval_data a split of TRAIN or --eval_share of it is held out. A class is the model's label of
that name; else a thousand classes named by WordNet numbers are ImageNet's in order; a subset of them, such as
Imagenette, needs --class_list (a file, or pictures of all thousand); other classes need --new_head.

Written to OUT: the model and its preprocessor, metrics.json, learning_curve.png. What is random about a picture follows
from the seed, the epoch and its place in the data, and so is the same after a resume and with any number of workers and
processes.

DeiT-tiny on one core, 224 pixels: 12 pictures a second when it evaluates, 3 s and 1.8 GB a step of 32 pictures when it
trains. To expect of exact attention: top-1 .783 on a photograph of each ImageNet class (--eval_only); on 1,000 pictures
of Imagenette at 160 pixels .702 of the thousand labels before any training, and .955 on 200 of them after one epoch (25
steps) on the others.
"""

import inspect
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])  # as a file: the folder above recipes

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    ViTImageProcessorPil,
)

import hf_efficient_attn as hea
from hf_efficient_attn.demo import quiet_loading
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods.base import MethodConfig
from recipes.benchmarks.tasks import for_length
from recipes.data.image_classes import class_indices, read_class_list
from recipes.data.image_tensors import Evaluation, Norm, PictureDataset, Training
from recipes.data.images import (
    EVAL_SPLITS,
    TRAIN_SPLITS,
    Pictures,
    at_most,
    divide,
    load,
    pick,
    readable,
    sorted_classes,
)
from recipes.training import (
    AttentionArguments,
    RecipeArguments,
    about_run,
    main_of,
    parse,
    prepare_attention,
    train_and_report,
    write_report,
)

DEFAULTS = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "learning_rate": 5e-5,
    "weight_decay": 0.05,
    "lr_scheduler_type": "cosine",
    "label_smoothing_factor": 0.1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "remove_unused_columns": False,
}


@dataclass
class ModelArguments:
    """Which model, at which size of picture."""

    _argument_group_name = "model"

    model_name_or_path: str = field(
        metadata={"help": "Image classifier: a folder or a hub id.", "aliases": ["--model"]}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Random weights: take only the model's config."})
    new_head: bool = field(default=False, metadata={"help": "A new classifier, with the classes of the training data."})
    resolution: int | None = field(
        default=None,
        metadata={"help": "Side of the pictures; other than the model's own, its positions are interpolated."},
    )
    image_mean: list[float] | None = field(
        default=None, metadata={"help": "By channel, of values from 0 to 1. Default: as the checkpoint says."}
    )
    image_std: list[float] | None = field(default=None, metadata={"help": "As --image_mean."})
    resample: str | None = field(
        default=None,
        metadata={"help": "bilinear, bicubic or lanczos, for resizing. Default: as the checkpoint says."},
    )


@dataclass
class DataArguments:
    """Which pictures, of which class."""

    _argument_group_name = "data"

    train_data: str | None = field(default=None, metadata={"help": "Hub id, folder or zip file."})
    eval_data: str | None = field(
        default=None, metadata={"help": "The same, for the evaluation. Default: a split of --train_data."}
    )
    train_split: str | None = field(default=None, metadata={"help": "Default: train, where there are splits."})
    eval_split: str | None = field(default=None, metadata={"help": "Default: validation, val, dev or test."})
    eval_share: float | None = field(
        default=None, metadata={"help": "Evaluate on this share of the training pictures, held out at random."}
    )
    split_seed: int = field(
        default=0, metadata={"help": "Of --eval_share and of the choice of --max_..._samples; --seed does not move it."}
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    image_column: str | None = field(default=None, metadata={"help": "Of a hub data set. Default: the only one."})
    label_column: str | None = field(default=None, metadata={"help": "Of a hub data set. Default: the only one."})
    class_list: str | None = field(
        default=None,
        metadata={
            "help": "Names of the data's classes in the order of the model's labels: a file with a name a line, "
            "imagenet_class_index.json, or a folder or zip file of pictures of all classes."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many, drawn at random."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn at random."})
    skip_bad_images: bool = field(default=False, metadata={"help": "Go on without images that cannot be read."})
    check_images: bool = field(
        default=True, metadata={"help": "Read every image once before the first step (by --dataloader_num_workers)."}
    )
    eval_only: bool = field(default=False, metadata={"help": "Evaluate the model as it is, or with --attention."})
    crop_ratio: float = field(
        default=0.875, metadata={"help": "Side of the square in the middle over the shorter side, in the evaluation."}
    )
    augmentation: str = field(
        default="crop",
        metadata={
            "help": "Of training pictures. none: as in the evaluation. crop: random part and mirror image. trivial: "
            "TrivialAugment on top of it.",
            "choices": ["none", "crop", "trivial"],
        },
    )
    crop_scale: float = field(default=0.08, metadata={"help": "Least share of the area in a random part."})
    flip: float = field(default=0.5, metadata={"help": "Probability of the mirror image."})
    color_jitter: float = field(
        default=0.0, metadata={"help": "Change of brightness, contrast and saturation by up to this share."}
    )


def check(model: ModelArguments, data: DataArguments, attention: AttentionArguments) -> None:
    """Raise ValueError for options that contradict each other or are out of range, before anything is read."""
    if data.train_data is None and not (data.eval_only and data.eval_data):
        raise ValueError("--train_data is missing: a hub id, a folder or a zip file (or --eval_only with --eval_data)")
    if data.eval_data is not None and data.eval_share is not None:
        raise ValueError("--eval_data and --eval_share exclude each other: give the one that is meant")
    if data.eval_only and (attention.stages or attention.preset):
        raise ValueError("--stages and --preset are of training: with --eval_only give the method by --attention")
    if data.eval_only and (model.new_head or model.from_scratch):
        raise ValueError("--eval_only would evaluate random weights with --new_head or --from_scratch")
    if (model.image_mean is None) != (model.image_std is None):
        raise ValueError("--image_mean and --image_std belong together: give both or none")
    for name, low, high in (("crop_ratio", 0.1, 1), ("crop_scale", 0.001, 1), ("flip", 0, 1), ("color_jitter", 0, 1)):
        if not low <= getattr(data, name) <= high:
            raise ValueError(f"--{name} {getattr(data, name)} is not from {low} to {high}")
    for name in ("max_train_samples", "max_eval_samples"):
        if getattr(data, name) is not None and getattr(data, name) < 1:
            raise ValueError(f"--{name} {getattr(data, name)} are none: give 1 or more, or leave it out for all")


# ------------------------------------------------------------------------------------------------------------- pictures


def read_pictures(options: DataArguments) -> tuple[Pictures | None, Pictures]:
    """What to train on (None with --eval_only) and what to evaluate on: whole splits, nothing read yet.

    Raises:
        ValueError: a source that cannot be read, a split that is missing or empty.
    """
    columns = {
        "config": options.data_config, "image_column": options.image_column, "label_column": options.label_column,
    }  # fmt: skip
    sources = {name: load(name, **columns) for name in {options.train_data, options.eval_data} if name is not None}
    train = evaluation = None
    if options.train_data is not None:
        splits = sources[options.train_data]
        train = splits.get("") or pick(splits, options.train_split, TRAIN_SPLITS, options.train_data)
        if options.train_split is not None and "" in splits:
            pick(splits, options.train_split, (), options.train_data)
        if train is None:
            raise ValueError(f"{options.train_data} has no split train; name one by --train_split: {', '.join(splits)}")
        if options.eval_share is not None:
            train, evaluation = divide(train, options.eval_share, options.split_seed)
        elif options.eval_data is None:
            evaluation = pick(splits, options.eval_split, EVAL_SPLITS, options.train_data)
    if options.eval_data is not None:
        splits = sources[options.eval_data]
        evaluation = pick(splits, options.eval_split, EVAL_SPLITS, options.eval_data)
        if evaluation is None and len(splits) == 1:
            (evaluation,) = splits.values()
    if evaluation is None:
        where = options.eval_data or options.train_data
        raise ValueError(
            f"{where} has no split to evaluate on: give --eval_data, --eval_split, or --eval_share 0.1 for a tenth of "
            "the training pictures"
        )
    return None if options.eval_only else train, evaluation


def classes_of(parts: Sequence[Pictures]) -> tuple[list[str], bool]:
    """All class names of the parts, and whether their order is that of the source's numbered labels."""
    orders = {part.order for part in parts}
    if len(orders) == 1 and None not in orders:
        return list(*orders), True
    return sorted_classes(name for part in parts for name in part.class_names()), False


def names_of_new_head(train: Pictures, evaluation: Pictures, class_list: Sequence[str] | None) -> list[str]:
    """The labels of a classifier for the training data.

    Raises:
        ValueError: a class of either part is not among them, or there is only one.
    """
    names = list(class_list or train.class_names())
    for part in (train, evaluation):
        unknown = sorted_classes(set(part.classes) - set(names))
        if unknown:
            where = "the class list" if class_list else "the training data"
            raise ValueError(f"{part.where}: unknown label {unknown[0]!r}: it is not a class of {where}")
    if len(names) < 2:
        raise ValueError(f"{train.where}: only one class, {names[0]!r}: there is nothing to tell apart")
    return names


def look_at(pictures: Pictures, options: DataArguments, count: int | None, threads: int) -> tuple[Pictures, list[str]]:
    """So many of the pictures, all of which can be read, and the names of those that were left out."""
    pictures = at_most(pictures, count, options.split_seed)
    return readable(pictures, skip=options.skip_bad_images, threads=threads) if options.check_images else (pictures, [])


# ---------------------------------------------------------------------------------------------------------------- model


def load_model(options: ModelArguments, labels: Sequence[str] | None) -> nn.Module:
    """The classifier; with `labels`, under a new head for them."""
    named: dict[str, Any] = {}
    if labels is not None:
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if options.from_scratch:
        changes = {} if options.resolution is None else {"image_size": options.resolution}
        return AutoModelForImageClassification.from_config(
            AutoConfig.from_pretrained(options.model_name_or_path, **named, **changes)
        )
    with quiet_loading():
        same = labels is not None and AutoConfig.from_pretrained(options.model_name_or_path).num_labels == len(labels)
        model = AutoModelForImageClassification.from_pretrained(
            options.model_name_or_path, **named, ignore_mismatched_sizes=labels is not None
        )
    if same:
        # Nothing was mismatched, so that the old head was loaded.
        for module in model.children():
            if isinstance(module, nn.Linear) and module.out_features == len(labels):
                nn.init.normal_(module.weight, std=model.config.initializer_range)
                nn.init.zeros_(module.bias)
    return model


def norm_of(options: ModelArguments) -> Norm:
    """How the pictures are resized and scaled.

    Raises:
        ValueError: a pretrained checkpoint does not say it and the options do not either.
    """
    from PIL.Image import Resampling

    try:
        settings = AutoImageProcessor.from_pretrained(options.model_name_or_path).to_dict()
    except OSError as error:
        # Of weights from here no one has said anything: the usual values of ImageNet.
        settings = ViTImageProcessorPil(resample=Resampling.BICUBIC).to_dict() if options.from_scratch else {}
        if not settings and not (options.image_mean and options.resample):
            raise ValueError(
                f"{options.model_name_or_path} has no preprocessor_config.json: give --image_mean, --image_std and "
                "--resample as they were when it was trained"
            ) from error
    if options.image_mean is not None:
        settings |= {"image_mean": options.image_mean, "image_std": options.image_std, "do_normalize": True}
    if options.resample is not None:
        if options.resample.upper() not in ("BILINEAR", "BICUBIC", "LANCZOS"):
            raise ValueError(f"--resample {options.resample} is none of bilinear, bicubic, lanczos")
        settings["resample"] = Resampling[options.resample.upper()]
    norm = Norm.of(settings)
    if len(norm.mean) != 3 or len(norm.std) != 3 or min(norm.std) <= 0:
        raise ValueError(f"mean {norm.mean} and deviation {norm.std}: three channels are wanted, the latter above 0")
    return norm


def processor_of(norm: Norm, pixels: int, crop_ratio: float) -> ViTImageProcessorPil:
    """What cuts a picture as the evaluation does, to be saved with the model."""
    return ViTImageProcessorPil(
        resample=norm.resample, image_mean=list(norm.mean), image_std=list(norm.std), do_center_crop=True,
        size={"shortest_edge": round(pixels / crop_ratio)}, crop_size={"height": pixels, "width": pixels},
    )  # fmt: skip


def fit_resolution(model: nn.Module, pixels: int | None) -> tuple[int, int | None, bool]:
    """The side of the pictures, the tokens of one where that is known, and whether positions are interpolated.

    Raises:
        ValueError: the model takes no pictures of this size.
    """
    own, patch = (getattr(model.config, name, None) for name in ("image_size", "patch_size"))
    own, patch = (size[0] if isinstance(size, (list, tuple)) and len(set(size)) == 1 else size for size in (own, patch))
    pixels = own if pixels is None else pixels
    kind = type(model).__name__
    if not isinstance(pixels, int):
        raise ValueError(f"{kind} does not say how large its pictures are: give --resolution")
    if not isinstance(patch, int):
        patch = None
    if pixels < 1 or (patch and pixels % patch):
        raise ValueError(f"--resolution {pixels} is no multiple of the {patch} pixels of a patch of {kind}")
    if getattr(model.config, "num_channels", 3) != 3:
        raise ValueError(f"{kind} takes {model.config.num_channels} channels; pictures are read in three, RGB")
    if pixels != own and "interpolate_pos_encoding" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{kind} cannot interpolate its positions: leave --resolution out for its own {own} pixels")
    tables = [p for name, p in model.named_parameters() if name.endswith("position_embeddings") and p.ndim == 3]
    if not patch or not isinstance(own, int) or len(tables) != 1:
        return pixels, None, pixels != own
    # Beside the patches the table holds the class token, and DeiT's distillation token.
    return pixels, (pixels // patch) ** 2 + tables[0].shape[1] - (own // patch) ** 2, pixels != own


class Sized:
    """AttentionArguments whose methods have their learned tables for so many tokens, where they have tables.

    Of a model at a resolution other than its own these cannot be told from its config.
    """

    def __init__(self, attention: AttentionArguments, tokens: int | None) -> None:
        self.attention, self.tokens = attention, tokens

    def method(self):
        """As `AttentionArguments.method`."""
        found = self.attention.method()
        return found and (self.sized(found[0]), found[1])

    def schedule(self, total_steps: int | None = None):
        """As `AttentionArguments.schedule`."""
        found = self.attention.schedule(total_steps)
        if found is None:
            return None
        stages = []
        for stage in found.stages:
            if stage.settings is not None and len(stage.settings.entries) == 1:
                entry = stage.settings.entries[0]
                stage = replace(stage, settings=EfficientAttentionConfig(self.sized(entry.config), None, entry.layers))
            stages.append(stage)
        return hea.UptrainingSchedule(stages, found.total_steps)

    def sized(self, method):
        """The config with tables of the right length; raises ValueError where it says another."""
        if not isinstance(method, MethodConfig) or self.tokens is None:
            return method
        given = getattr(method, "max_length", 0)
        if 0 < given < self.tokens:
            raise ValueError(f"{method.method}: max_length={given}, but a picture has {self.tokens} tokens")
        return method if given else for_length(method, self.tokens)


@torch.no_grad()
def probe(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """One forward pass, so that what the model refuses is refused before the training."""
    training = model.training
    model.eval()(**{key: x.to(model.device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()})
    model.train(training)


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Collator:
    """Rows of a `PictureDataset` -> a batch: pixel_values (B, 3, P, P), labels (B,)."""

    interpolate: bool

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }
        return batch | {"interpolate_pos_encoding": True} if self.interpolate else batch


class Epochs(TrainerCallback):
    """Tells the data the epoch; accelerate does so in a single process only."""

    def __init__(self, data: PictureDataset) -> None:
        self.data = data

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        # A resumed run begins amid an epoch; at the end of one it is a whole number, to rounding.
        self.data.set_epoch(int((state.epoch or 0) + 1e-6))


class ImageTrainer(Trainer):
    """Trainer that can resume a ViT.

    `save_pretrained` writes ViT's and DeiT's weights under their older names, which `from_pretrained` alone translates:
    Trainer itself would find none of its layers in a checkpoint, warn, and go on with what the model had.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model = self.model if model is None else model
        if self.is_fsdp_enabled or not isinstance(model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with quiet_loading():
            saved = type(model).from_pretrained(resume_from_checkpoint, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def first_five(logits, labels) -> torch.Tensor:
    """(B, classes) -> the classes of the five largest, largest first (B, 5)."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.topk(min(5, logits.shape[-1])).indices


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Share of the pictures whose class is the first, and among the first five where there are more than five."""
    right = found.predictions == found.label_ids[:, None]
    figures = {"top1": float(right[:, 0].mean())}
    return figures | {"top5": float(right.any(1).mean())} if right.shape[1] == 5 else figures


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe; returns what stands in `metrics.json`."""
    options, data, attention, args = parse(
        ModelArguments, DataArguments, AttentionArguments, description=__doc__, argv=argv, defaults=DEFAULTS
    )
    check(options, data, attention)
    with args.main_process_first():
        train, evaluation = read_pictures(data)
    parts = [part for part in (train, evaluation) if part is not None]
    class_list = None if data.class_list is None else read_class_list(data.class_list)
    if options.new_head:
        labels = names_of_new_head(train, evaluation, class_list)
        indices, how = {name: i for i, name in enumerate(labels)}, "a new head"
    else:
        config, (names, own_order) = AutoConfig.from_pretrained(options.model_name_or_path), classes_of(parts)
        known = [str(config.id2label[i]) for i in range(config.num_labels)]
        indices, how = class_indices(names, known, class_list=class_list, own_order=own_order)
        labels = None
    norm, threads = norm_of(options), args.dataloader_num_workers
    evaluation, bad = look_at(evaluation, data, data.max_eval_samples, threads)
    if train is not None:
        train, more = look_at(train, data, data.max_train_samples, threads)
        bad = more + bad
    say(args, f"{len(indices)} classes, {how}" + (f"; left out, unreadable: {', '.join(bad)}" if bad else ""))

    model = load_model(options, labels)
    pixels, tokens, interpolate = fit_resolution(model, options.resolution)
    callbacks = prepare_attention(model, Sized(attention, tokens))
    seen = Evaluation(pixels, norm, data.crop_ratio)
    evaluated = PictureDataset(evaluation, indices, seen)
    trained = None
    if train is not None:
        random = Training(
            pixels, norm, (data.crop_scale, 1.0), flip=data.flip, jitter=data.color_jitter,
            trivial=data.augmentation == "trivial",
        )  # fmt: skip
        trained = PictureDataset(train, indices, seen if data.augmentation == "none" else random, args.seed)
        callbacks = [*callbacks, Epochs(trained)]
    collate = Collator(interpolate)
    probe(model, collate([evaluated[0]]))
    trainer = ImageTrainer(
        model=model, args=args, data_collator=collate, train_dataset=trained, eval_dataset=evaluated,
        processing_class=processor_of(norm, pixels, data.crop_ratio), callbacks=callbacks, compute_metrics=accuracy,
        preprocess_logits_for_metrics=first_five,
    )  # fmt: skip
    extra = {
        "model": options.model_name_or_path,
        "resolution": pixels,
        "tokens": tokens,
        "crop_ratio": data.crop_ratio,
        "augmentation": data.augmentation,
        "train_data": None if train is None else {"from": train.where, "pictures": len(train)},
        "eval_data": {"from": evaluation.where, "pictures": len(evaluation)},
        "classes": how,
        "left_out": bad,
    }
    if data.eval_only:
        return evaluate_and_report(trainer, attention, extra)
    return train_and_report(trainer, attention, evaluate=evaluated, extra=extra, metric="eval_top1")


def evaluate_and_report(trainer: Trainer, attention: AttentionArguments, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the model as it is, written and printed as those of a training are."""
    args = trainer.args
    figures = {key: x for key, x in trainer.evaluate().items() if key != "eval_model_preparation_time"}
    about = about_run(attention, trainer.model, args.world_size, args.device)
    report = {"metrics": figures, "steps": 0, "seed": args.seed, **about, "switches": [], **extra}
    if trainer.is_world_process_zero():
        write_report(report, trainer.state.log_history, args.output_dir, "eval_top1")
    return report


def say(args: RecipeArguments, text: str) -> None:
    """A line on stderr, from the first process."""
    if args.process_index == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main_of(run)
