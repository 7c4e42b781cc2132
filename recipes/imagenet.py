"""Fine-tune, up-train or evaluate an image classifier (ViT, DeiT, T2T-ViT) with any attention method.

    python recipes/imagenet.py --model_name_or_path DEIT --train_data TRAIN --eval_data VAL --output_dir OUT
    python recipes/imagenet.py ... --attention kdeformer --set num_samples=64 --resolution 384
    python recipes/imagenet.py ... --attention longformer --set global_tokens=1 --eval_only       (without training)
    accelerate launch --config_file recipes/configs/eight_gpus.yaml recipes/imagenet.py ... --preset imagenet
    python recipes/imagenet.py --from_scratch --model t2t_vit_flurka --new_head --preset imagenet --train_data TRAIN ...

The last command is the image classification of the FLuRKA paper (A.4): its T2T-ViT from random weights, up-trained from
the Linformer for 16.7 % of the steps, or with --variant flurka_linear from the linear transformer for 33.3 %, in the
token stages and the backbone. --layers accepts the names of stages: --attention kdeformer --layers t2t.0,t2t.1.
`hf_efficient_attn.models.t2t_vit.convert_checkpoint` converts the authors' checkpoints to folders for --model.

TRAIN and VAL are hub ids, folders or zip files with `<split>/<class>/<file>`, `<class>/<file>`, or files whose names
begin with WordNet numbers. Without --eval_data a split of TRAIN is used, or --eval_share of it is held out. A class is
matched with the model's label of the same name. Otherwise a thousand classes named by WordNet numbers are ImageNet's in
order. A subset of them, such as Imagenette, needs --class_list (a file, or pictures of all thousand classes). Other
classes need --new_head.

OUT gets the model and its preprocessor, metrics.json and learning_curve.png. Random augmentation depends on the seed,
the epoch and the index of the picture only, so that resumed runs and any number of workers and processes give the same.

Duration for DeiT-tiny on one core at 224 pixels: 12 pictures a second in evaluation; 3 s and 1.8 GB for a training step
of 32 pictures. Expected with exact attention: top-1 .783 on one photograph of each ImageNet class (--eval_only). On
1,000 pictures of Imagenette at 160 pixels: .702 among the thousand labels without training, and .955 on 200 of them
after one epoch (25 steps) on the others.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import torch
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_efficient_attn.checkpoint.loading import no_progress_bar
from recipes.common.arguments import AttentionArguments, RecipeArguments, check_counts, main_of, option, parse
from recipes.common.data.image_classes import class_indices, read_class_list
from recipes.common.data.image_tensors import Evaluation, PictureDataset, Training, augmentation
from recipes.common.data.images import (
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
from recipes.common.image_models import (
    ModelArguments,
    SizedAttention,
    config_of,
    fit_resolution,
    load_model,
    norm_of,
    probe,
    processor_of,
)
from recipes.common.training import evaluate_and_report, prepare_attention, train_and_report

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
class DataArguments:
    """The pictures and their classes."""

    _argument_group_name = "data"

    train_data: str | None = option("Hub id, folder or zip file.", default=None)
    eval_data: str | None = option("Pictures to evaluate on. Default: a split of --train_data.", default=None)
    train_split: str | None = option("Split to train on. Default: train, if there are splits.", default=None)
    eval_split: str | None = option("Split to evaluate on. Default: validation, val, dev or test.", default=None)
    eval_share: float | None = option(
        "Hold out this share of the training pictures at random for evaluation.", default=None
    )
    split_seed: int = option("Seed of --eval_share and --max_..._samples, independent of --seed.", default=0)
    data_config: str | None = option("Configuration of a hub data set.", default=None)
    image_column: str | None = option("Column of a hub data set. Default: the only one of its type.", default=None)
    label_column: str | None = option("Column of a hub data set. Default: the only one of its type.", default=None)
    class_list: str | None = option(
        "Class names in the order of the model's labels: a file with one name per line, "
        "imagenet_class_index.json, or a folder or zip file of pictures of all classes.",
        default=None,
    )
    max_train_samples: int | None = option("Train on at most N pictures, chosen at random.", default=None, metavar="N")
    max_eval_samples: int | None = option(
        "Evaluate on at most N pictures, chosen at random.", default=None, metavar="N"
    )
    skip_bad_images: bool = option("Skip images that cannot be read.", default=False)
    check_images: bool = option(
        "Decode every image once before the first step, with --dataloader_num_workers threads.", default=True
    )
    eval_only: bool = option("Evaluate without training.", default=False)
    crop_ratio: float = option(
        "Side of the central square that is evaluated, as a share of the shorter side.", default=0.875
    )
    augmentation: str = option(
        "Augmentation of training pictures. none: as in evaluation. crop: random crop and flip. trivial: "
        "TrivialAugment as well, which needs torchvision.",
        default="crop",
        choices=["none", "crop", "trivial"],
    )
    crop_scale: float = option("Smallest share of the area in a random crop.", default=0.08)
    flip: float = option("Probability of a horizontal flip.", default=0.5)
    color_jitter: float = option(
        "Largest relative change of brightness, contrast and saturation, by torchvision.", default=0.0
    )


def check(model: ModelArguments, data: DataArguments, attention: AttentionArguments) -> None:
    """Raise ValueError for options that contradict each other or are out of range, before the data is read."""
    if data.train_data is None and not (data.eval_only and data.eval_data):
        raise ValueError(
            "--train_data is missing: give a hub id, a folder or a zip file (or --eval_only with --eval_data)"
        )
    if data.eval_data is not None and data.eval_share is not None:
        raise ValueError("--eval_data and --eval_share exclude each other: give only one of them")
    if data.eval_only and (attention.stages or attention.preset):
        raise ValueError("--stages and --preset need a training: with --eval_only give the method with --attention")
    if data.eval_only and (model.new_head or model.from_scratch):
        raise ValueError(
            "--eval_only with --new_head or --from_scratch would evaluate random weights: leave one of them out"
        )
    if (model.image_mean is None) != (model.image_std is None):
        raise ValueError("--image_mean and --image_std belong together: give both or neither")
    for name, low, high in (("crop_ratio", 0.1, 1), ("crop_scale", 0.001, 1), ("flip", 0, 1), ("color_jitter", 0, 1)):
        if not low <= getattr(data, name) <= high:
            raise ValueError(f"--{name} {getattr(data, name)} must be between {low} and {high}")
    check_counts(data, "max_train_samples", "max_eval_samples")
    augmentation(data.color_jitter, data.augmentation == "trivial")


def read_pictures(options: DataArguments) -> tuple[Pictures | None, Pictures]:
    """The splits to train on (None with --eval_only) and to evaluate on. No picture is read yet.

    Raises:
        ValueError: a source cannot be read, or a split is missing or empty.
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
            raise ValueError(
                f"{options.train_data} has no split train: give one of {', '.join(splits)} with --train_split"
            )
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
    """All class names of the splits, and whether their order is that of the source's numbered labels."""
    orders = {part.order for part in parts}
    if len(orders) == 1 and None not in orders:
        return list(*orders), True
    return sorted_classes(name for part in parts for name in part.class_names()), False


def names_of_new_head(train: Pictures, evaluation: Pictures, class_list: Sequence[str] | None) -> list[str]:
    """The labels of a new classifier.

    Raises:
        ValueError: the data has a class that is not among them, or there is only one label.
    """
    names = list(class_list or train.class_names())
    for part in (train, evaluation):
        unknown = sorted_classes(set(part.classes) - set(names))
        if unknown:
            where = "the class list" if class_list else "the training data"
            raise ValueError(f"{part.where}: unknown label {unknown[0]!r}, which is not a class of {where}")
    if len(names) < 2:
        raise ValueError(f"{train.where} has only one class, {names[0]!r}: a classifier needs two or more")
    return names


def checked(pictures: Pictures, options: DataArguments, count: int | None, threads: int) -> tuple[Pictures, list[str]]:
    """Choose `count` pictures and check that they can be read; return them and the names of skipped ones."""
    pictures = at_most(pictures, count, options.split_seed)
    return readable(pictures, skip=options.skip_bad_images, threads=threads) if options.check_images else (pictures, [])


@dataclass(frozen=True)
class Collator:
    """Collates examples of a `PictureDataset` to a batch: pixel_values (B, 3, P, P), labels (B,)."""

    interpolate: bool

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate a batch."""
        batch: dict[str, Any] = {
            "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
            "labels": torch.tensor([example["labels"] for example in examples]),
        }
        return batch | {"interpolate_pos_encoding": True} if self.interpolate else batch


class Epochs(TrainerCallback):
    """Tells the data set the epoch. Accelerate does so only with a single process."""

    def __init__(self, data: PictureDataset) -> None:
        self.data = data

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Set the epoch."""
        # A resumed run starts within an epoch. At the end of an epoch the value is an integer up to rounding.
        self.data.set_epoch(int((state.epoch or 0) + 1e-6))


class ImageTrainer(Trainer):
    """Trainer that can resume a ViT.

    `save_pretrained` writes the weights of ViT and DeiT under their older names, which only `from_pretrained`
    translates. Trainer itself would not find the layers in a checkpoint, warn, and continue with the current weights.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if self.is_fsdp_enabled or not isinstance(model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with no_progress_bar():
            saved = type(model).from_pretrained(resume_from_checkpoint, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def top_five(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """The classes of the five largest logits (B, classes), largest first: (B, 5)."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.topk(min(5, logits.shape[-1])).indices


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Top-1 accuracy, and top-5 accuracy if there are five classes or more."""
    correct = found.predictions == found.label_ids[:, None]
    figures = {"top1": float(correct[:, 0].mean())}
    return figures | {"top5": float(correct.any(1).mean())} if correct.shape[1] == 5 else figures


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    options, data, attention, args = parse(
        ModelArguments, DataArguments, SizedAttention, description=__doc__, argv=argv, defaults=DEFAULTS
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
        config, (names, own_order) = config_of(options), classes_of(parts)
        known = [str(config.id2label[i]) for i in range(config.num_labels)]
        indices, how = class_indices(names, known, class_list=class_list, own_order=own_order)
        labels = None
    norm, threads = norm_of(options), args.dataloader_num_workers
    evaluation, bad = checked(evaluation, data, data.max_eval_samples, threads)
    if train is not None:
        train, more = checked(train, data, data.max_train_samples, threads)
        bad = more + bad
    say(
        args,
        f"{len(indices)} classes, {how}" + (f"; skipped, since they cannot be read: {', '.join(bad)}" if bad else ""),
    )

    model = load_model(options, labels)
    pixels, tokens, interpolate = fit_resolution(model, options.resolution)
    attention.tokens = tokens
    callbacks = prepare_attention(model, attention)
    plain = Evaluation(pixels, norm, data.crop_ratio)
    evaluated = PictureDataset(evaluation, indices, plain)
    trained = None
    if train is not None:
        random = Training(
            pixels, norm, (data.crop_scale, 1.0), flip=data.flip, jitter=data.color_jitter,
            trivial=data.augmentation == "trivial",
        )  # fmt: skip
        trained = PictureDataset(train, indices, plain if data.augmentation == "none" else random, args.seed)
        callbacks = [*callbacks, Epochs(trained)]
    collate = Collator(interpolate)
    probe(model, collate([evaluated[0]]))
    trainer = ImageTrainer(
        model=model, args=args, data_collator=collate, train_dataset=trained, eval_dataset=evaluated,
        processing_class=processor_of(norm, pixels, data.crop_ratio), callbacks=callbacks, compute_metrics=accuracy,
        preprocess_logits_for_metrics=top_five,
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
        return evaluate_and_report(trainer, attention, extra=extra, metric="eval_top1")
    return train_and_report(trainer, attention, evaluate=evaluated, extra=extra, metric="eval_top1")


def say(args: RecipeArguments, text: str) -> None:
    """Print a line on stderr from the first process."""
    if args.process_index == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main_of(run)
