"""The groups of experiments: which recipes run with which attention, and the tables of their results."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_efficient_attn.evaluation.demo import minilm_folder


@dataclass(frozen=True)
class Group:
    """A table with a line for each attention and a column for each figure.

    Attributes:
        tasks: recipe and arguments of each task. Each task runs once for every line.
        attention: arguments of each line.
        figures: task of each column, and its key in metrics.json.
        note: description of the figures, with steps and subsets.
        untrained: tasks without training, which cannot be up-trained.
    """

    tasks: Mapping[str, Sequence[str]]
    attention: Mapping[str, Sequence[str]]
    figures: Mapping[str, tuple[str, str]]
    note: str
    untrained: Sequence[str] = ()

    def pairs(self) -> list[tuple[str, str]]:
        """Line and task of all runs."""
        return [
            (row, task)
            for task in self.tasks
            for row, arguments in self.attention.items()
            if not (task in self.untrained and "--stages" in arguments)
        ]


def attention(method: str, *settings: str) -> list[str]:
    """Arguments of a recipe that trains with one method from the first step."""
    return ["--attention", method, *(["--set", *settings] if settings else [])]


def glue_group(data: pathlib.Path) -> Group:
    """MiniLM on GLUE. The sentences are short, so budgets are small: 16 columns, 16 landmarks, tables of 128."""
    tables = "projection_dim=128", "share=none"
    common = (
        f"--data {data}/glue --model_name_or_path {minilm_folder()} --max_length 64 --num_train_epochs 1 "
        "--per_device_train_batch_size 16 --learning_rate 1e-4 --bf16 "
        "--use_cpu --max_eval_samples 400 --eval_strategy no --save_strategy no"
    ).split()
    names = {
        "stsb": ("STS-B", "spearman"),
        "mrpc": ("MRPC", "f1"),
        "cola": ("CoLA", "matthews_correlation"),
        "rte": ("RTE", "accuracy"),
    }
    return Group(
        tasks={label: ["recipes.glue", "--task", task, *common] for task, (label, _) in names.items()},
        attention={
            "exact": attention("sdpa"),
            "nearfar": attention("nearfar", "block_size=2", "num_samples=14"),
            "kdeformer": attention("kdeformer", "block_size=8", "num_samples=8"),
            "wildcat": attention("wildcat", "num_samples=16"),
            "thinformer": attention("thinformer", "num_samples=16"),
            "nystromformer": attention("nystromformer", "num_landmarks=16"),
            "linear": attention("linear"),
            "performer": attention("performer", "num_features=128"),
            "flurka_performer": attention("flurka_performer", *tables, "num_features=128"),
            "flurka_performer, up-trained 25 %": [
                "--stages",
                f"linformer,{','.join(tables)}:0.25",
                "flurka_performer,num_features=128:1.0",
            ],
        },
        figures={label: (label, f"eval_{figure}") for label, figure in names.values()}
        | {"MRPC, accuracy": ("MRPC", "eval_accuracy")},
        note="MiniLM, one epoch, batches of 16 examples of up to 64 tokens, bfloat16 (steps: STS-B 360, CoLA 535, MRPC "
        "230, RTE 156); F1 of MRPC, accuracy of RTE, Matthews correlation of CoLA, Spearman correlation of STS-B, on "
        "400 examples of the development sets (RTE has 277).",
    )


def imagenet_group(data: pathlib.Path) -> Group:
    """DeiT-tiny: converted and evaluated on ImageNet's thousand samples, and fine-tuned on Imagenette."""
    images = data / "images"
    model = ["recipes.imagenet", "--model", f"{data}/models/deit-tiny-imagenet"]
    samples = f"{images}/imagenet1k-sample-256px.zip"
    switched = [*model, "--eval_only", "--eval_data", samples, "--max_eval_samples", "500"]
    tuned = (
        f"--train_data {images}/imagenette160-val-1000.zip --class_list {samples} --eval_share 0.2 --eval_strategy no "
        "--save_strategy no --per_device_train_batch_size 16 --learning_rate 1e-4 --warmup_steps 10"
    ).split()
    tables = "projection_dim=64", "share=none"
    return Group(
        tasks={
            "switched": switched,
            "224 px": [*model, *tuned, "--max_steps", "60"],
            "384 px": [*model, *tuned, "--max_steps", "15", "--resolution", "384"],
        },
        attention={
            "exact": attention("sdpa"),
            "nearfar": attention("nearfar", "block_size=8", "num_samples=56"),
            "kdeformer": attention("kdeformer", "block_size=32", "num_samples=32"),
            "wildcat": attention("wildcat", "num_samples=64"),
            "thinformer": attention("thinformer", "num_samples=64"),
            "nystromformer": attention("nystromformer", "num_landmarks=32"),
            "performer": attention("performer", "num_features=128"),
            "flurka_performer": attention("flurka_performer", *tables, "num_features=128"),
            "flurka_performer, up-trained 16.7 %": [
                "--stages",
                f"linformer,{','.join(tables)}:0.167",
                "flurka_performer,num_features=128:1.0",
            ],
        },
        figures={
            "thousand classes, converted": ("switched", "eval_top1"),
            "Imagenette 224 px": ("224 px", "eval_top1"),
            "Imagenette 384 px": ("384 px", "eval_top1"),
        },
        untrained=("switched",),
        note="DeiT-tiny, top-1 among 1,000 classes. Converted: 500 of ImageNet's sample photographs at 224 pixels, no "
        "training. Imagenette: 200 photographs after 60 steps (15 at 384 pixels) of 16 of the other 800.",
    )


def lm_group(data: pathlib.Path) -> Group:
    """A small GPT-2 that copies distant passages, before and after a short fine-tuning."""
    common = (
        f"recipes.clm --model {data}/models/gpt2-books --text {data}/text/books --block_size 2048 --drop_short "
        "--max_eval_windows 8 --eval_positions --per_device_eval_batch_size 2"
    ).split()
    tuned = (
        "--max_steps 25 --per_device_train_batch_size 2 --learning_rate 3e-4 --warmup_steps 4 --eval_strategy no"
        " --save_strategy no"
    )
    figures: dict[str, tuple[str, str]] = {}
    for task in ("before", "after"):
        figures[f"{task}: text"] = (task, "eval_loss")
        for distance in (256, 768, 1536):
            figures[f"{task}: repeated at {distance}"] = (task, f"eval_repeat_{distance}_second")
    return Group(
        tasks={"before": [*common, "--eval_only"], "after": [*common, *tuned.split()]},
        attention={
            "exact": attention("sdpa"),
            "nearfar": attention("nearfar"),
            "kdeformer": attention("kdeformer", "block_size=256", "num_samples=256"),
            "hyperattention": attention("hyperattention", "block_size=256", "num_samples=256"),
            "longformer": attention("longformer", "window_size=256"),
            "scatterbrain": attention("scatterbrain"),
            "eva": attention("eva"),
            "performer": attention("performer", "num_features=256"),
            "linear": attention("linear"),
        },
        figures=figures,
        untrained=("before",),
        note="gpt2-books, nats per token on 8 held-out windows of 2,048 tokens, and on passages of 128 tokens that are "
        "repeated after 256, 768 and 1,536 tokens; before any training and after 25 steps of 2 windows.",
    )


def lra_group(data: pathlib.Path) -> Group:
    """The small encoder of the Long Range Arena, on sequences so short that a run takes minutes of one core.

    The methods have the hyperparameters of `with_budget(8)`, except for performer.
    """
    common = (
        "recipes.lra --initializer_range 0.1 --dropout 0 --learning_rate 2e-3 --eval_strategy no --save_strategy no "
        "--use_cpu --task"
    )
    listops = (
        "listops --min_length 12 --max_length 64 --listops_depth 4 --listops_args 5 --listops_train 40000 "
        "--listops_eval 1000 --pooling cls --num_heads 4 --max_steps 2000 --per_device_train_batch_size 32"
    )
    image = (
        f"image --data {data}/images/cifar10-jpeg-test10k-train5k.zip --train_split test --eval_split train "
        "--max_length 144 --max_eval_samples 1000 --max_steps 2000 --per_device_train_batch_size 16"
    )
    return Group(
        tasks={"ListOps": f"{common} {listops}".split(), "image": f"{common} {image}".split()},
        attention={
            "exact": attention("sdpa"),
            "kdeformer": attention("kdeformer", "block_size=2", "num_samples=6"),
            "linear": attention("linear"),
            "nystromformer": attention("nystromformer", "num_landmarks=4"),
            "nearfar": attention("nearfar", "block_size=1", "num_samples=7"),
            "hyperattention": attention("hyperattention", "block_size=2", "num_samples=6"),
            "longformer": attention("longformer", "window_size=3"),
            "linformer": attention("linformer", "projection_dim=8"),
            "performer": attention("performer", "num_features=32"),
            "flurka_linear": attention("flurka_linear", "projection_dim=8"),
            "wildcat": attention("wildcat", "num_samples=8", "num_candidates=32"),
            "thinformer": attention("thinformer", "num_samples=8"),
        },
        figures={name: (name, "eval_accuracy") for name in ("ListOps", "image")}
        | {f"{name}, CPU s per step": (name, "cpu_seconds_per_step") for name in ("ListOps", "image")},
        note="Accuracy of an encoder of 2 layers with hidden size 64 from scratch. ListOps: 13 to 63 tokens (mean 21), "
        "operators of up to 5 arguments, at most 3 nested; 2,000 steps of 32 of 40,000 expressions, 1,000 others to "
        "evaluate. Without a model, the most frequent answer has .116, and the most frequent one for the outermost "
        "operator .238. Image: CIFAR-10 as 12 x 12 grey pixels (144 tokens); 2,000 steps of 16 of 10,000 pictures, "
        "1,000 others to evaluate; chance is .1. Every method has the budget of 8 exact keys per query, below the "
        "length of all sequences; performer has 32 features, and linear has no budget. The benchmark has longer "
        "sequences and trains far longer.",
    )


def flurka_lines(
    size: int, switch_warmup_steps: int, distill: int, features: Sequence[str] = ()
) -> dict[str, Sequence[str]]:
    """Exact attention, the bases, a FLuRKA variant from the first step, and the variant up-trained from either base.

    Args:
        size: contracted keys of the Linformer and of the variant.
        switch_warmup_steps: steps of the lines whose learning rate rises from 0 again after the switch.
        distill: steps of the lines in which what the base did not have imitates it at the switch. They come on top of
            the others.
        features: hyperparameters of learned features of the kernel base and of the variant; none for elu + 1.
    """
    variant, tables = "flurka_linear", (f"projection_dim={size}", "share=none")
    bases = {"linear": ",".join(("linear", *features)), "linformer": ",".join(("linformer", *tables))}
    last = ",".join((variant, *tables, *features))
    end = f"{last}:1.0"
    lines: dict[str, Sequence[str]] = {
        "exact": attention("sdpa"),
        "linear": attention("linear", *features),
        "linformer": attention("linformer", *tables),
        variant: attention(variant, *tables, *features),
    }
    for base, stage in bases.items():
        for share in (10, 25, 50):
            lines[f"{variant}, up-trained {share} % from {base}"] = ["--stages", f"{stage}:{share / 100:g}", end]
    for base, stage in bases.items():
        lines[f"{variant}, up-trained 25 % from {base}, warm-up"] = [
            *("--stages", f"{stage}:0.25", end, "--switch_warmup_steps", str(switch_warmup_steps))
        ]
    for base, stage in bases.items():
        if base == "linear" or features:  # without learned features, linformer has all that the variant learns
            lines[f"{variant}, up-trained 25 % from {base}, distilled"] = [
                *("--stages", f"{stage}:0.25", f"{last},distill={distill}:1.0")
            ]
    return lines


def flurka_figures(task: str, accuracy: str) -> dict[str, tuple[str, str]]:
    """Columns of the groups that compare up-training with its references."""
    return {
        "loss": (task, "eval_loss"),
        "accuracy": (task, accuracy),
        "CPU s per step": (task, "cpu_seconds_per_step"),
        "s per step": (task, "seconds_per_step"),
    }


def flurka_images_group(data: pathlib.Path) -> Group:
    """The claim of the FLuRKA paper on up-training: a small T2T-ViT from random weights."""
    pictures = f"{data}/images/cifar10-jpeg-test10k-train5k.zip"
    common = (
        "recipes.imagenet --from_scratch --new_head --model recipes/configs/t2t_vit_small --check_images False "
        f"--train_data {pictures} --train_split test --eval_data {pictures} --eval_split train --max_eval_samples 500 "
        "--crop_ratio 1.0 --augmentation none --label_smoothing_factor 0 --max_steps 300 --warmup_steps 30 "
        "--per_device_train_batch_size 16 --learning_rate 3e-3 --eval_steps 30 --save_strategy no --use_cpu"
    )
    return Group(
        tasks={"pictures": common.split()},
        attention=flurka_lines(size=16, switch_warmup_steps=15, distill=30),
        figures=flurka_figures("pictures", "eval_top1"),
        note="T2T-ViT with .17 M parameters from scratch: CIFAR-10's 10,000 test pictures as JPEG, 32 pixels, token "
        "stages of 256 and 64 tokens, 3 layers with 65; 300 steps of 16 pictures, learning rate .003; "
        "loss and accuracy on 500 pictures of the training set (chance: 2.303 and .1). 16 contracted keys.",
    )


def flurka_books_group(data: pathlib.Path) -> Group:
    """The claim of the FLuRKA paper on up-training: a small masked language model from random weights."""
    names = ("dracula_345", "frankenstein_84", "pride-and-prejudice_1342", "a-tale-of-two-cities_98")
    common = (
        f"recipes.mlm --model_type eurobert --text {' '.join(f'{data}/text/books/{name}.txt.gz' for name in names)} "
        "--train_tokenizer 320 --block_size 64 --drop_short --max_eval_windows 256 --config_overrides hidden_size=64 "
        "num_hidden_layers=2 num_attention_heads=2 num_key_value_heads=2 intermediate_size=128 "
        "max_position_embeddings=64 initializer_range=0.08 rope_parameters={'rope_type':'default','rope_theta':100.0} "
        "--max_steps 1200 --warmup_steps 120 --per_device_train_batch_size 16 --learning_rate 2e-3 --eval_steps 120 "
        "--save_strategy no --use_cpu"
    )
    return Group(
        tasks={"books": common.split()},
        attention=flurka_lines(
            size=16, switch_warmup_steps=60, distill=120, features=("feature_map=hedgehog", "num_features=32")
        ),
        figures=flurka_figures("books", "eval_accuracy"),
        note="EuroBERT with .12 M parameters from scratch: four novels, 320 tokens, windows of 64; 1,200 steps of 16 "
        "windows; loss and accuracy on the masked tokens of 256 windows from the ends of the novels (by the "
        "frequencies of the tokens alone: 4.366 and .048). 16 contracted keys; learned features, hedgehog "
        "with num_features=32.",
    )


def translation_group(data: pathlib.Path) -> Group:
    """A small Marian from random weights, whose encoder alone has the method. The pairs are generated; no data needed.

    Every method has 8 contracted keys or 32 features, below the length of the sources.
    """
    common = (
        "recipes.translation --generate 9600 --eval_share 0.0125 --model_type marian --train_tokenizer 340 "
        "--config_overrides d_model=64 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 "
        "decoder_attention_heads=4 encoder_ffn_dim=128 decoder_ffn_dim=128 max_position_embeddings=64 dropout=0.0 "
        "scale_embedding=True init_std=0.12 --max_source_length 64 --max_target_length 64 --max_steps 300 "
        "--per_device_train_batch_size 32 --per_device_eval_batch_size 120 --learning_rate 3e-3 --eval_strategy no "
        "--save_strategy no --use_cpu"
    )
    tables, features = ("projection_dim=8", "share=none"), "num_features=32"

    def preset(variant: str, *settings: str) -> list[str]:
        return ["--preset", "nmt", "--variant", variant, "--set", *settings]

    return Group(
        tasks={"numbers": common.split()},
        attention={
            "exact": attention("sdpa"),
            "linear": attention("linear"),
            "performer": attention("performer", features),
            "linformer": attention("linformer", *tables),
            "flurka_linear": attention("flurka_linear", *tables),
            "flurka_performer": attention("flurka_performer", *tables, features),
            "flurka_linear, up-trained as in the paper": preset("flurka_linear", *tables),
            "flurka_performer, up-trained as in the paper": preset("flurka_performer", *tables, features),
        },
        figures={
            "BLEU": ("numbers", "eval_bleu"),
            "chrF": ("numbers", "eval_chrf"),
            "right to the letter": ("numbers", "eval_exact_match"),
            "loss": ("numbers", "eval_loss"),
            "CPU s per step": ("numbers", "cpu_seconds_per_step"),
        },
        note="Marian of .2 M parameters from scratch (2 + 2 layers, hidden size 64): generated lists of two to five "
        "English numbers below 100 into German ones, in the same or in reverse order; 300 steps of 32 of 9,600 pairs, "
        "120 others to evaluate. Only the encoder has the method. The preset trains the encoder as linear (64 % of the "
        "steps) or linformer (80 %) first.",
    )


GROUPS: dict[str, Callable[[pathlib.Path], Group]] = {
    "glue": glue_group,
    "imagenet": imagenet_group,
    "lm": lm_group,
    "lra": lra_group,
    "flurka_images": flurka_images_group,
    "flurka_books": flurka_books_group,
    "translation": translation_group,
}
