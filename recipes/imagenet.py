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

import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
    import recipes  # noqa: F401  # first: it reports missing packages

import transformers
from PIL.Image import Resampling
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import AutoModelForImageClassification, PreTrainedModel, ViTImageProcessorPil

from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.evaluation.data import resizing_of, side_of
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, image_processor
from hf_efficient_attn.training.switch import use_new_names
from recipes.common import training
from recipes.common.arguments import PER_EPOCH, AttentionArguments, check_counts, main_of, option, parse, samples
from recipes.common.data import images
from recipes.common.data.image_tensors import Evaluation, Norm, PictureDataset, Training, preprocessor_settings
from recipes.common.data.images import Pictures

DEFAULTS = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "learning_rate": 5e-5,
    "weight_decay": 0.05,
    "lr_scheduler_type": "cosine",
    "label_smoothing_factor": 0.1,
    "remove_unused_columns": False,
    **PER_EPOCH,
}


@dataclass
class ModelArguments:
    """The model and its resolution."""

    _argument_group_name = "model"

    model_name_or_path: str = option(
        "Image classifier: a folder or a hub id; with --from_scratch also a T2T-ViT by name: "
        f"{', '.join(T2TViTConfig.names())}.",
        aliases=["--model"],
    )
    from_scratch: bool = option("Start from random weights, with the model's config.", False)
    new_head: bool = option("Use a new classifier for the classes of the training data.", False)
    resolution: int | None = option("Pixels of a side. Positions are interpolated if it is not the model's own.", None)

    @property
    def is_architecture(self) -> bool:
        """Whether the model is the name of an architecture without weights. A folder of that name takes precedence."""
        name = self.model_name_or_path
        if name not in T2TViTConfig.names() or os.path.isdir(name):
            return False
        if not self.from_scratch:
            raise ValueError(
                f"{name} is an architecture without weights: give --from_scratch, or a folder that "
                "hf_efficient_attn.models.t2t_vit.convert_checkpoint made from the authors' checkpoint"
            )
        return True


def config_of(options: ModelArguments, **changes: Any) -> transformers.PretrainedConfig:
    """The config of the model, with `changes`."""
    make = T2TViTConfig.from_name if options.is_architecture else transformers.AutoConfig.from_pretrained
    return make(options.model_name_or_path, **changes)


def load_model(options: ModelArguments, labels: Sequence[str] | None) -> PreTrainedModel:
    """Load the classifier, with a new head if `labels` are given."""
    named: dict[str, Any] = {}
    if labels is not None:
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if options.from_scratch:
        changes = {} if options.resolution is None else {"image_size": options.resolution}
        return AutoModelForImageClassification.from_config(config_of(options, **named, **changes))
    with no_progress_bar():
        same = labels is not None and config_of(options).num_labels == len(labels)
        model = AutoModelForImageClassification.from_pretrained(
            options.model_name_or_path, **named, ignore_mismatched_sizes=labels is not None
        )
    # If the shapes match, the old head was loaded: reset it.
    for module in model.children() if same else ():
        if isinstance(module, nn.Linear) and module.out_features == len(labels):
            nn.init.normal_(module.weight, std=model.config.initializer_range)
            nn.init.zeros_(module.bias)
    return model


def norm_of(options: ModelArguments) -> Norm:
    """How the pictures are resized and normalised. A pretrained checkpoint must define it."""
    if options.is_architecture:
        return Norm.of(image_processor(config_of(options)).to_dict())
    try:
        return Norm.of(preprocessor_settings(options.model_name_or_path))
    except OSError as error:
        if not options.from_scratch:
            raise ValueError(
                f"{options.model_name_or_path} has no preprocessor_config.json: save the image processor that it was "
                "trained with in its folder, such as ViTImageProcessorPil(image_mean=..., image_std=..., resample=...)"
            ) from error
        # New weights have no preprocessor: use the usual values of ImageNet.
        return Norm.of(ViTImageProcessorPil(resample=Resampling.BICUBIC).to_dict())


def processor_of(norm: Norm, pixels: int, crop_ratio: float) -> ViTImageProcessorPil:
    """An image processor that crops like the evaluation, to be saved with the model."""
    return ViTImageProcessorPil(
        resample=norm.resample, image_mean=list(norm.mean), image_std=list(norm.std), do_center_crop=True,
        size={"shortest_edge": round(pixels / crop_ratio)}, crop_size={"height": pixels, "width": pixels},
    )  # fmt: skip


def fit_resolution(model: PreTrainedModel, pixels: int | None) -> tuple[int, int | None, bool]:
    """Set the resolution of a model. None keeps the model's own. T2T-ViT is changed and needs no interpolation.

    The results are the side of the pictures, the number of tokens of a picture (None if it differs between layers or is
    unknown), and whether positions are interpolated.
    """
    own, patch = (side_of(getattr(model.config, name, None)) for name in ("image_size", "patch_size"))
    pixels, kind = own if pixels is None else pixels, type(model).__name__
    if pixels is None:
        raise ValueError(f"the config of {kind} has no square image_size: give --resolution")
    if pixels < 1 or (patch and pixels % patch):
        raise ValueError(f"--resolution {pixels} is not a multiple of the {patch} pixels of a patch of {kind}")
    if getattr(model.config, "num_channels", 3) != 3:
        raise ValueError(f"{kind} has {model.config.num_channels} input channels; pictures are read as RGB, with three")
    resizing = {} if pixels == own else resizing_of(model, pixels)
    if resizing is None:
        raise ValueError(f"{kind} cannot interpolate its positions: leave out --resolution to use its own {own} pixels")
    if hasattr(model, "set_image_size"):
        if pixels != own:
            model.set_image_size(pixels)
        # Each attention module has its own number of tokens, which is the length of a method's tables.
        sizes = {module.max_tokens for module in model.modules() if hasattr(module, "max_tokens")}
        return pixels, sizes.pop() if len(sizes) == 1 else None, False
    tables = [p for name, p in model.named_parameters() if name.endswith("position_embeddings") and p.ndim == 3]
    if not patch or not own or len(tables) != 1:
        return pixels, None, bool(resizing)
    # The table also holds the class token, and DeiT's distillation token.
    return pixels, (pixels // patch) ** 2 + tables[0].shape[1] - (own // patch) ** 2, bool(resizing)


@dataclass
class DataArguments:
    """The pictures and their classes."""

    _argument_group_name = "data"

    train_data: str | None = option("Hub id, folder or zip file.", None)
    eval_data: str | None = option("Pictures to evaluate on. Default: a split of --train_data.", None)
    train_split: str | None = option("Split to train on. Default: train, if there are splits.", None)
    eval_split: str | None = option("Split to evaluate on. Default: validation, val, dev or test.", None)
    eval_share: float | None = option("Hold out this share of the training pictures at random for evaluation.", None)
    class_list: str | None = option(
        "Class names in the order of the model's labels: a file with one name per line, or a folder or zip file of "
        "pictures of all classes.",
        None,
    )
    max_train_samples: int | None = samples("Train on")
    max_eval_samples: int | None = samples("Evaluate on")
    eval_only: bool = option("Evaluate without training.", False)
    crop_ratio: float = option("Side of the central square that is evaluated, as a share of the shorter side.", 0.875)
    augmentation: str = option(
        "Augmentation of training pictures. none: as in evaluation. crop: random crop and flip.",
        "crop",
        choices=["none", "crop"],
    )
    crop_scale: float = option("Smallest share of the area in a random crop.", 0.08)
    flip: float = option("Probability of a horizontal flip.", 0.5)

    def __post_init__(self) -> None:
        if self.train_data is None and not (self.eval_only and self.eval_data):
            raise ValueError("--train_data is missing: give pictures (or --eval_data with --eval_only)")
        if self.eval_data is not None and self.eval_share is not None:
            raise ValueError("--eval_data and --eval_share exclude each other: give only one of them")
        for name, low in (("crop_ratio", 0.1), ("crop_scale", 0.001), ("flip", 0)):
            if not low <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be between {low} and 1")
        check_counts(self, "max_train_samples", "max_eval_samples")


def read_pictures(options: DataArguments) -> tuple[Pictures | None, Pictures]:
    """The splits to train on (None with --eval_only) and to evaluate on. No picture is read yet."""
    train = evaluation = None
    source = options.eval_data or options.train_data
    splits = images.load(source)
    if options.eval_share is None:
        evaluation = images.pick(splits, options.eval_split, images.EVAL_SPLITS, source)
        if evaluation is None and options.eval_data and len(splits) == 1:
            (evaluation,) = splits.values()
    if options.train_data is not None:
        splits = images.load(options.train_data) if options.eval_data else splits
        train = images.pick(splits, options.train_split, images.TRAIN_SPLITS, options.train_data) or splits.get("")
        if train is None:
            raise ValueError(f"{options.train_data} has no split train: give --train_split, {', '.join(splits)}")
        if options.eval_share is not None:
            train, evaluation = images.divide(train, options.eval_share)
    if evaluation is None:
        raise ValueError(f"{source} has no split to evaluate on: give --eval_data, --eval_split, or --eval_share")
    return None if options.eval_only else train, evaluation


def classes_of(
    options: ModelArguments, parts: Sequence[Pictures], class_list: Sequence[str] | None
) -> tuple[dict[str, int], list[str] | None, str]:
    """The model's output of every class of the splits, the labels of a new head, and how the outputs were found."""
    if not options.new_head:
        config, orders = config_of(options), {part.order for part in parts}
        own_order = len(orders) == 1 and None not in orders
        names = images.sorted_classes(name for part in parts for name in part.class_names())
        known = [str(config.id2label[i]) for i in range(config.num_labels)]
        indices, how = images.class_indices(
            list(*orders) if own_order else names, known, class_list=class_list, own_order=own_order
        )
        return indices, None, how
    labels, where = list(class_list or parts[0].class_names()), "the class list" if class_list else "the training data"
    for part in parts:
        for name in images.sorted_classes(set(part.classes) - set(labels)):
            raise ValueError(f"{part.where}: unknown label {name!r}, which is not a class of {where}")
    if len(labels) < 2:
        raise ValueError(f"{parts[0].where} has only one class, {labels[0]!r}: a classifier needs two or more")
    return {name: i for i, name in enumerate(labels)}, labels, "a new head"


def collate(examples: Sequence[dict[str, Any]], interpolate: bool) -> dict[str, Any]:
    """Collate examples of a `PictureDataset` to a batch: pixel_values (B, 3, P, P), labels (B,)."""
    batch = default_collate(examples)
    return {**batch, "interpolate_pos_encoding": True} if interpolate else batch


def top_five(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """The classes of the five largest logits (B, classes), largest first: (B, 5)."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.topk(min(5, logits.shape[-1])).indices


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    """Top-1 accuracy, and top-5 accuracy if there are five classes or more."""
    correct = found.predictions == found.label_ids[:, None]
    figures = {"top1": float(correct[:, 0].mean())}
    return figures | {"top5": float(correct.any(1).mean())} if correct.shape[1] == 5 else figures


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the recipe with the given options; return the contents of metrics.json."""
    kinds = ModelArguments, DataArguments, AttentionArguments
    options, data, attention, args = parse(*kinds, description=__doc__, argv=argv, **DEFAULTS)
    if data.eval_only and (attention.stages or attention.preset):
        raise ValueError("--stages and --preset need a training: with --eval_only give the method with --attention")
    if data.eval_only and (options.new_head or options.from_scratch):
        raise ValueError("--eval_only: --new_head and --from_scratch have random weights; leave one out")
    with args.main_process_first():
        train, evaluation = read_pictures(data)
    class_list = None if data.class_list is None else images.read_class_list(data.class_list)
    parts = [part for part in (train, evaluation) if part is not None]
    indices, labels, how = classes_of(options, parts, class_list)
    norm = norm_of(options)
    counts = (data.max_eval_samples if part is evaluation else data.max_train_samples for part in parts)
    parts = [images.at_most(part, count) for part, count in zip(parts, counts, strict=True)]
    if args.process_index == 0:
        print(f"{len(indices)} classes, {how}", file=sys.stderr, flush=True)
    model = load_model(options, labels)
    pixels, attention.tokens, interpolate = fit_resolution(model, options.resolution)
    # Transformers saves ViT and DeiT under older names, which Trainer does not find when it resumes.
    model.register_load_state_dict_pre_hook(use_new_names)
    callbacks = training.prepare_attention(model, attention)
    plain = Evaluation(pixels, norm, data.crop_ratio)
    evaluated, trained = PictureDataset(parts[-1], indices, plain), None
    if train is not None:
        random = Training(pixels, norm, (data.crop_scale, 1.0), data.flip)
        trained = PictureDataset(parts[0], indices, plain if data.augmentation == "none" else random, args.seed)
        callbacks.append(training.Epochs(trained.epoch))
    trainer = transformers.Trainer(
        model=model, args=args, data_collator=functools.partial(collate, interpolate=interpolate),
        train_dataset=trained, eval_dataset=evaluated, processing_class=processor_of(norm, pixels, data.crop_ratio),
        callbacks=callbacks, compute_metrics=accuracy, preprocess_logits_for_metrics=top_five,
    )  # fmt: skip
    extra = {
        "model": options.model_name_or_path, "resolution": pixels, "tokens": attention.tokens, "classes": how,
        "crop_ratio": data.crop_ratio, "augmentation": data.augmentation,
        "train_data": None if train is None else {"from": train.where, "pictures": len(parts[0])},
        "eval_data": {"from": evaluation.where, "pictures": len(parts[-1])},
    }  # fmt: skip
    return training.run_and_report(
        trainer, attention, evaluate=evaluated, extra=extra, metric="eval_top1", train=not data.eval_only
    )


if __name__ == "__main__":
    main_of(run)
