"""The image recipe: sources and classes of pictures, preprocessing, augmentation, and training."""

import functools
import json
import pickle

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification, Dinov2Config, Dinov2ForImageClassification

import hf_efficient_attn as hea
from helpers import commands
from helpers.commands import losses
from recipes import imagenet
from recipes.benchmarks import tasks
from recipes.common.data import image_tensors, images
from recipes.common.data.image_tensors import Evaluation, Norm, PictureDataset, Training
from recipes.common.data.images import class_indices, read_class_list
from tiny_models import IMAGE, SIZES, tiny_model
from tiny_recipes import lay_out, packed, painted, refuses, train

datasets, Image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
PLAIN = Norm((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 3)


@pytest.fixture(scope="module")
def colors(here) -> str:
    return str(here / "colors.zip")


def dots(target, names: str) -> str:
    return lay_out(target, dict.fromkeys(names.split(), packed(Image.new("RGB", (8, 8), (255, 0, 0)))))


NUMBERED = {"": "n01440764 n02012849"}
LAYOUTS = {
    "classes": ("cat/a.jpg dog/b.png dog/c.JPEG", {"": "cat dog dog"}),
    "splits": ("train/cat/a.jpg val/dog/b.jpg", {"train": "cat", "val": "dog"}),
    "one split": ("test/cat/a.jpg test/dog/b.jpg", {"test": "cat dog"}),
    "outer folder": ("set/train/cat/a.jpg set/train/dog/a.jpg", {"train": "cat dog"}),
    "outer folder of classes": ("set/cat/a.jpg set/dog/b.jpg", {"": "cat dog"}),
    "a class called test": ("cat/a.jpg test/b.jpg", {"": "cat test"}),
    "numbered": ("n01440764_tench.jpg n02012849-crane.jpg", NUMBERED),
    "numbered splits": ("train/n01440764_a.jpg val/n02012849.jpg", {"train": "n01440764", "val": "n02012849"}),
    "numbered classes": ("n01440764/n01440764_1.jpg n02012849/x.jpg", NUMBERED),
    "named classes": ("tench/n01440764_1.jpg crane/n02012849_1.jpg", {"": "crane tench"}),
    "system files": ("cat/a.jpg dog/b.jpg __MACOSX/cat/._a.jpg .cache/c.jpg read.txt", {"": "cat dog"}),
}


@pytest.mark.parametrize("target", ["folder", "pictures.zip"])
@pytest.mark.parametrize(("files", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(files, expected, target, tmp_path):
    splits = images.load(dots(tmp_path / target, files))
    assert {split: " ".join(pictures.classes) for split, pictures in splits.items()} == expected
    for pictures in splits.values():
        assert pictures.open(0).size == (8, 8)
        assert pickle.loads(pickle.dumps(pictures)).open(0).getpixel((0, 0)) == (255, 0, 0)


UNKNOWN = ["cat/a.jpg dog/old/b.jpg", "a.jpg b.jpg", "n01440764_a.jpg b.jpg", "one/cat/a.jpg two/cat/b.jpg"]
UNKNOWN += ["train/cat/images/a.jpg train/dog/images/a.jpg", "train/cat/a.jpg dog/b.jpg", "read.txt"]


@pytest.mark.parametrize("files", UNKNOWN)
def test_layouts_without_classes_are_refused(files, tmp_path):
    named = {"read.txt": "holds no picture", "cat/a.jpg dog/old/b.jpg": "is unknown.*cat/a.jpg, dog/old/b.jpg"}
    for target in ("folder", "pictures.zip"):
        refuses(named.get(files, "the class of a picture is unknown"), images.load, dots(tmp_path / target, files))


def test_every_process_opens_the_zip_file_itself(colors, monkeypatch):
    """Forked processes would share the position of a file that was opened before."""
    reader = images.load(colors)["train"].reader
    content, count = reader("train/red/0.jpg"), images._archive.cache_info().currsize
    monkeypatch.setattr(images.os, "getpid", lambda: -1)
    assert reader("train/red/0.jpg") == content and images._archive.cache_info().currsize == count + 1


def test_invalid_sources_are_refused(tmp_path, monkeypatch):
    (tmp_path / "list.txt").write_text("cat")
    for source in (tmp_path / "absent", tmp_path / "absent.zip", "absent.zip"):
        refuses("no such folder or zip file", images.load, str(source))
    refuses("neither a zip file nor a folder", images.load, str(tmp_path / "list.txt"))

    def refuse(source):
        raise ConnectionError(f"offline, and no {source} in the cache")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    refuses(r"someone/pets is neither a folder nor a zip file, and .*offline", images.load, "someone/pets")


def data_set(labels, names=("dog", "cat"), image="image", label="label"):
    """A data set of the library. Picture i has a width of i + 1 pixels."""
    pictures = [Image.new("RGB", (i + 1, 4)) for i in range(len(labels))]
    kind = datasets.ClassLabel(names=list(names)) if names else datasets.Value("string")
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: pictures, label: list(labels)}, features)


def test_data_sets_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    data_set([0, 1]).to_parquet(tmp_path / "set" / "train.parquet")
    data_set([1]).to_parquet(tmp_path / "set" / "test.parquet")
    splits = images.load(str(tmp_path / "set"))
    assert list(splits["train"].classes) == ["dog", "cat"] and list(splits["test"].classes) == ["cat"]
    assert splits["train"].class_names() == ["dog", "cat"], "the order of its labels, not the alphabetical one"
    assert [splits["train"].open(i).size for i in (0, 1)] == [(1, 4), (2, 4)]

    def loaded(*given, **columns):
        monkeypatch.setattr(datasets, "load_dataset", lambda source: {"train": data_set(*given, **columns)})
        return images.load("someone/pets")["train"]

    assert loaded(["b", "a"], names=None).class_names() == ["a", "b"]
    assert loaded([1], image="img", label="kind").classes == ("cat",)
    refuses("no column 'label' among image, kind: rename", loaded, ["b"], names=None, label="kind")
    refuses("1 of 2 rows have no label", loaded, [0, -1])
    refuses("the split is empty", loaded, [])


def test_splits_and_parts(tmp_path):
    files = " ".join(f"{split}/cat/{i}.png" for split in ("test", "dev", "train") for i in range(10))
    splits = images.load(dots(tmp_path / "splits", files))
    assert images.pick(splits, None, images.EVAL_SPLITS, "pets") is splits["dev"]
    assert images.pick(splits, "test", images.EVAL_SPLITS, "pets") is splits["test"]
    kinds = images.load(dots(tmp_path / "kinds.zip", " ".join(f"{c}/{i}.png" for c in "abc" for i in range(6))))[""]
    assert sorted(images.divide(kinds, 0.5)[1].classes) == [*"aaabbbccc"], "every class is split evenly"
    assert sorted(images.at_most(kinds, 6).classes) == [*"aabbcc"] and images.at_most(kinds, 99) is kinds
    first, second = images.divide(splits["train"], 0.3)
    assert (len(first), len(second)) == (7, 3) and {*first.keys, *second.keys} == set(splits["train"].keys)
    assert images.divide(splits["train"], 0.3)[1].keys == second.keys != splits["train"].keys[:3]
    for share in (0, 1, 0.01):
        refuses("empty", images.divide, splits["train"], share)


def test_pictures_of_all_kinds_become_rgb():
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    for picture, expected in (
        (packed(Image.new("L", (6, 4), 90)), (90, 90, 90)),
        (packed(Image.fromarray(np.full((4, 6), 90 * 257, np.uint16))), (90, 90, 90)),  # not clipped to white
        (packed(Image.new("RGBA", (6, 4), (10, 20, 30, 0))), (10, 20, 30)),
        (packed(palette, "GIF", transparency=1), (10, 20, 30)),
    ):
        assert images.decode(picture).getpixel((0, 0)) == expected
    for mode in ("I", "F"):
        refuses("32 bits", images.decode, packed(Image.new(mode, (6, 4)), "TIFF"))
    red, green, blue = images.decode(packed(Image.new("CMYK", (6, 4), (0, 255, 255, 0)), "JPEG")).getpixel((0, 0))
    assert red > 200 and green < 60 and blue < 60
    picture, exif = Image.new("RGB", (6, 4)), Image.Exif()
    picture.putpixel((0, 0), (255, 255, 255))
    exif[0x0112] = 6  # rotated by 90 degrees
    rotated = images.decode(packed(picture, exif=exif))
    assert rotated.size == (4, 6) and rotated.getpixel((3, 0)) == (255, 255, 255)


def test_pictures_that_cannot_be_read(tmp_path):
    whole = painted((9, 99, 9), (200, 200))
    files = {"cat/cut.jpg": whole[: len(whole) * 3 // 4], "cat/text.jpg": b"no picture", "cat/none.png": b""}
    pictures = images.load(lay_out(tmp_path / "pictures.zip", files))[""]
    for i, reason in enumerate(("truncated", "not a picture", "not a picture of a known format")):
        refuses(f"{pictures.keys[i]} cannot be read: .*{reason}", pictures.open, i)


def test_classes_are_matched_by_list_name_number_or_order_or_refused():
    ten = [str(i) for i in range(10)]
    assert class_indices(["b", "a"], ["x", "y", "z"], class_list=["a", "c", "b"])[0] == {"b": 2, "a": 0}
    assert class_indices(["cat"], ["dog", "cat"])[0] == {"cat": 1}
    # Names take precedence over the order, and numbers over it as well.
    assert class_indices(["cat", "dog"], ["dog", "cat"])[0] == {"cat": 1, "dog": 0}
    assert class_indices(["1", "3"], ["a", "b", "c", "d"])[0] == {"1": 1, "3": 3}
    assert class_indices(images.sorted_classes(["1", "10", "2"]), ["x", "y", "z"])[0] == {"1": 0, "2": 1, "10": 2}
    assert class_indices(ten, [f"LABEL_{i}" for i in range(10)])[0] == {name: i for i, name in enumerate(ten)}
    assert class_indices(["n1", "n2"], ["LABEL_0", "LABEL_1"])[0] == {"n1": 0, "n2": 1}
    # Numbered labels of a data set are names in any order. A model may have two labels of the same name.
    assert class_indices(["7", "5"], ["a", "b"], own_order=True)[0] == {"7": 0, "5": 1}
    assert class_indices(["n1", "n2", "n3"], ["crane", "dog", "crane"])[0]["n3"] == 2
    labels = ["cat", "dog", "cow"]
    refuses(r"unknown label: .*'n1', 'n2'.*--class_list FILE.*--new_head", class_indices, ["n1", "n2"], labels)
    refuses(r"3 classes each, .* orders .*'cow'.*'horse'.*--class_list", class_indices, ["cow", "dog", "horse"], labels)
    refuses("2 names and the model 3 labels", class_indices, ["cat"], labels, class_list=["cat", "dog"])
    refuses("the class list does not contain 'horse'", class_indices, ["horse"], labels, class_list=labels)
    refuses("'crane'", class_indices, ["crane"], ["crane", "dog", "crane"])


def test_class_lists(tmp_path):
    (tmp_path / "numbers.txt").write_text("\ufeffn00000002 dog, hound\n\nn00000001 cat\n", encoding="utf-8")
    assert read_class_list(str(tmp_path / "numbers.txt")) == ["n00000002", "n00000001"]
    (tmp_path / "names.txt").write_text("n00000002 dog\nsea cow\n")
    assert read_class_list(str(tmp_path / "names.txt")) == ["n00000002 dog", "sea cow"]
    assert read_class_list(dots(tmp_path / "pictures.zip", "train/b/1.png val/a/1.png")) == ["a", "b"]
    for name, text, message in (("twice", "cat\ncat\n", "'cat' occurs twice"), ("empty", "\n", "is empty")):
        (tmp_path / name).write_text(text)
        refuses(message, read_class_list, str(tmp_path / name))
    refuses("no such class list", read_class_list, str(tmp_path / "absent.txt"))


# --- tensors ---


def sloping(size):
    """A picture whose channels increase in different directions, so that every crop is different."""
    across, down = np.meshgrid(*(np.linspace(0, 255, length) for length in size))
    return Image.fromarray(np.stack([across, down, 255 - across], 2).astype("uint8"))


@pytest.mark.parametrize("size", [(70, 50), (50, 70), (64, 64), (301, 200), (20, 24)])
def test_evaluation_equals_the_saved_processor(size):
    """28 of 32 pixels of the shorter side. The margins are even, since the two round odd ones differently."""
    norm = Norm((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 3)
    theirs = imagenet.processor_of(norm, 28, 0.875)(sloping(size), return_tensors="pt")["pixel_values"][0]
    ours = Evaluation(28, norm)(sloping(size))
    assert ours.shape == (3, 28, 28)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    refuses("1/255", Norm.of, {"do_rescale": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    assert Norm.of({"do_normalize": False, "resample": 3}) == PLAIN


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_random_crops_are_within_their_bounds():
    cut = Training(32, PLAIN, scale=(0.2, 0.5))
    shares, ratios = [], []
    for seed in range(300):
        left, top, right, bottom = cut.box(90, 60, generator(seed))
        assert 0 <= left < right <= 90 and 0 <= top < bottom <= 60
        shares.append((right - left) * (bottom - top) / 5400)
        ratios.append((right - left) / (bottom - top))
    assert 0.19 < min(shares) < 0.22 and 0.48 < max(shares) < 0.51
    assert 0.73 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.37
    # No such crop fits into a narrow strip: the centre is used, with a ratio of 4/3.
    assert Training(32, PLAIN, scale=(0.9, 1.0)).box(400, 30, generator(0)) == (180, 0, 220, 30)


def test_the_crop_is_resized_and_flipped():
    picture, cut = images.decode(painted((90, 120, 30), (90, 60))), Training(32, PLAIN, flip=0)
    part = picture.crop(cut.box(90, 60, generator(3))).resize((32, 32), 3)
    assert torch.equal(cut(picture, generator(3)), image_tensors.to_tensor(part, PLAIN))
    flipped = [Training(32, PLAIN, flip=1)(picture, generator(seed)) for seed in range(40)]
    assert torch.equal(flipped[3].flip(2), cut(picture, generator(3)))
    assert 10 < sum(torch.equal(Training(32, PLAIN)(picture, generator(i)), x) for i, x in enumerate(flipped)) < 30


def test_augmentation_depends_on_seed_epoch_and_index_only(colors):
    pictures, indices = images.load(colors)["train"], {"blue": 0, "green": 1, "red": 2}
    augmented, other = (PictureDataset(pictures, indices, Training(16, PLAIN), seed=seed) for seed in (3, 4))
    first = augmented[5]["pixel_values"]
    torch.rand(7)
    state = torch.get_rng_state()
    assert torch.equal(augmented[5]["pixel_values"], first)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not used"
    assert not torch.equal(other[5]["pixel_values"], first)
    assert [augmented[i]["labels"] for i in (0, 8, 16)] == [0, 1, 2]
    # Workers give the same pictures, in every epoch.
    loader = torch.utils.data.DataLoader(augmented, batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in (1, 0):
        augmented.epoch.fill_(epoch)
        assert torch.equal(augmented[5]["pixel_values"], first) == (epoch == 0)
        found = torch.cat([batch["pixel_values"] for batch in loader])
        assert torch.equal(found, torch.stack([augmented[i]["pixel_values"] for i in range(len(augmented))]))


# --- training ---


recipe = functools.partial(train, "imagenet")  # in this process


def test_training_learns_and_is_reproducible(here, tmp_path, capsys):
    one, options = tmp_path / "one", ("--from_scratch", "--learning_rate", 3e-3, "--lr_scheduler_type", "constant")
    metrics = recipe(here, one, *options, "--max_steps", 50)["metrics"]
    assert "3 classes, by the order" in capsys.readouterr().err
    assert metrics["eval_top1"] >= 0.9 and "eval_top5" not in metrics, "there are only three classes"
    recipe(here, tmp_path / "two", *options, "--max_steps", 8)
    assert losses(tmp_path / "two") == losses(one)[:8]
    report = json.loads((one / "metrics.json").read_text())
    assert report["train_data"]["pictures"] == 24 and report["eval_data"]["pictures"] == 12
    assert (report["resolution"], report["tokens"]) == (32, 17)
    # Its processor crops like the evaluation.
    saved = json.loads((one / "preprocessor_config.json").read_text())
    assert saved["size"] == {"shortest_edge": 37} and saved["crop_size"] == {"height": 32, "width": 32}


def test_learned_tables_match_another_resolution(here, tmp_path):
    """48 pixels in patches of 8 give 37 tokens with the class token. The model's own 32 pixels give 17."""
    options = "--resolution", 48, "--max_steps", 2
    one = recipe(here, tmp_path / "one", "--attention", "linformer", "--set", "projection_dim=4", *options)
    assert (one["resolution"], one["tokens"]) == (48, 37)
    assert one["efficient_attention"]["max_length"] == 37
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "one")
    assert saved.config.image_size == 32
    assert saved.vit.layers[0].attention.learned_parameters.key_projection.shape == (4, 37)
    stages = "--stages", "linformer,projection_dim=4:0.5", "flurka_performer:1.0"
    two = recipe(here, tmp_path / "two", *stages, *options)["efficient_attention"]
    assert (two["method"], two["max_length"]) == ("flurka_performer", 37)
    again = recipe(here, tmp_path / "three", "--eval_only", "--resolution", 48, model=f"--model {tmp_path / 'one'}")
    assert again["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], abs=1e-6)


def test_a_new_head(here, colors, tmp_path):
    files = {f"{c}/{i}.jpg": painted((60 * i, 9, 9), seed=i) for c in "abcd" for i in range(4)}
    options = "--max_steps", 1, "--train_data", lay_out(tmp_path / "four.zip", files)
    words = r"4 classes, but the model has 3 labels.*--new_head"
    refuses(words, recipe, here, tmp_path / "one", *options, "--eval_share", 0.5)
    recipe(here, tmp_path / "two", "--new_head", *options, "--eval_share", 0.5)
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "two")
    assert saved.config.id2label == dict(enumerate("abcd")) and saved.classifier.out_features == 4
    with pytest.raises(ValueError, match="val: unknown label 'blue', which is not a class of the training data"):
        recipe(here, tmp_path / "three", "--new_head", *options, "--eval_data", colors)
    # A requested new head is new even with the same number of classes.
    old = AutoModelForImageClassification.from_pretrained(here / "vit")
    new = imagenet.load_model(imagenet.ModelArguments(str(here / "vit"), new_head=True), ["a", "b", "c"])
    assert not torch.equal(new.classifier.weight, old.classifier.weight)
    assert torch.equal(new.vit.embeddings.cls_token, old.vit.embeddings.cls_token)


def test_preprocessor_and_evaluation_data_are_required(here, tmp_path):
    AutoModelForImageClassification.from_pretrained(here / "vit").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"no preprocessor_config.json: save the image processor"):
        recipe(here, tmp_path / "out", "--eval_only", model=f"--model {tmp_path / 'bare'}")
    whole = dots(tmp_path / "whole.zip", "red/a.png green/b.png blue/c.png")
    refuses("has no split to evaluate on: give --eval_data", recipe, here, tmp_path / "out", "--train_data", whole)


def test_models_with_a_fixed_resolution(here):
    model = AutoModelForImageClassification.from_pretrained(here / "vit")
    assert imagenet.fit_resolution(model, None) == (32, 17, False)
    assert imagenet.fit_resolution(model, 64) == (64, 65, True)
    assert imagenet.fit_resolution(tiny_model("deit", head=True), None)[1] == 66, "with the distillation token"
    config = Dinov2Config(**SIZES, **IMAGE)  # interpolates unasked
    assert imagenet.fit_resolution(Dinov2ForImageClassification(config), 64) == (64, 257, False)
    model.forward = None
    refuses("cannot interpolate its positions", imagenet.fit_resolution, model, 64)
    # A T2T-ViT becomes one for that size, unless it holds tables already.
    model = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(here / "t2t"))
    assert imagenet.fit_resolution(model, 48) == (48, None, False) and model.config.image_size == 48
    assert [module.max_tokens for module in model.modules() if hasattr(module, "max_tokens")] == [576, 144, 37, 37]
    refuses("not a multiple of the 8 pixels of a patch", imagenet.fit_resolution, model, 50)
    words = r"holds parameters that its attention method learned .* convert it to 'sdpa'"
    refuses(words, imagenet.fit_resolution, hea.convert(model, "linformer", projection_dim=8), 32)


def test_t2t_vit_is_uptrained_and_evaluated_again(here, tmp_path):
    """With the paper's share of 40 steps, 16.7 %, in stages and backbone."""
    out, preset = tmp_path / "out", ("--preset", "imagenet", "--variant", "flurka_performer")
    options = "--set", "projection_dim=8", "--max_steps", 40, "--learning_rate", 3e-3, "--seed", 1
    report = recipe(here, out, *preset, *options, "--from_scratch", "--new_head", model=f"--model {here / 't2t'}")
    assert [(s["step"], s["from"], s["to"]) for s in report["switches"]] == [(7, "linformer", "flurka_performer")]
    assert losses(out)[0] > 0.8 and report["metrics"]["eval_top1"] >= 0.9
    assert (report["resolution"], report["tokens"]) == (32, None)
    saved = AutoModelForImageClassification.from_pretrained(out)
    learned = [module.learned_parameters for module in saved.modules() if hasattr(module, "learned_parameters")]
    assert [parameters.sizes["max_length"] for parameters in learned] == [256, 64, 17, 17]
    assert type(saved).__name__ == "T2TViTForImageClassification" and saved.config.id2label[0] == "blue"
    assert not saved.t2t_vit.embeddings.position_embeddings.requires_grad
    again = recipe(here, tmp_path / "again", "--eval_only", model=f"--model {out}")
    assert again["metrics"]["eval_loss"] == pytest.approx(report["metrics"]["eval_loss"], abs=1e-6)


def test_t2t_vit_by_name(here, tmp_path):
    """At 32 pixels it has 4 tokens and the class token, enough for a step."""

    def run(name, *options):
        recipe(here, tmp_path / name, "--resolution", 32, "--max_steps", 1, *options, model="--model t2t_vit_flurka")

    refuses("without weights: give --from_scratch, or a folder", run, "one")
    refuses(r"1000 labels.*--new_head", run, "two", "--from_scratch")
    run("three", "--from_scratch", "--new_head")
    config = AutoModelForImageClassification.from_pretrained(tmp_path / "three").config
    assert (config.hidden_size, config.num_hidden_layers, config.image_size, config.num_labels) == (256, 7, 32, 3)
    saved = json.loads((tmp_path / "three" / "preprocessor_config.json").read_text())
    assert saved["image_mean"] == [0.485, 0.456, 0.406] and saved["resample"] == 3


def test_classify_compares_methods_on_other_pictures(here, colors, tmp_path, table, capsys, monkeypatch):
    """`tasks classify` with several methods, budgets and layers, on exact and converted checkpoints."""
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(here / "t2t"))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    imagenet.processor_of(PLAIN, 32, 0.9).save_pretrained(folder)
    words = "classify", folder, colors, "--method kdeformer,performer --budget 4,300"
    rows, out = table(tasks, *words, "--layers t2t.0,1")
    assert "12 pictures of 32 pixels, layers t2t.0,1" in out
    assert [(row["attention"], row["budget"]) for row in rows] == [
        ("sdpa", "all"), ("kdeformer", "4"), ("kdeformer", "300"), ("performer", "4"), ("performer", "300"),
    ]  # fmt: skip
    # A budget of all tokens is exact attention.
    assert rows[2]["as exact"] == rows[0]["as exact"] == "1.0" and rows[2]["top-1"] == rows[0]["top-1"]
    # A converted checkpoint is compared with exact attention as well.
    hea.convert(model, "kdeformer", num_samples=2, block_size=2).save_pretrained(folder)
    used, guesses = [], tasks.guesses
    monkeypatch.setattr(
        tasks, "guesses", lambda one, *rest: used.append(one.config._attn_implementation) or guesses(one, *rest)
    )
    assert commands.run(tasks, *words, "--layers t2t.0,1") == 0
    assert used[::2] == used[1::2] == ["sdpa", "kdeformer", "kdeformer", "performer", "performer"]
    wrong = {"--split no": "has no split 'no'", "--layers t2t.2": "its layers are ['t2t.0', 't2t.1', 0, 1]"}
    for options, message in wrong.items():
        assert commands.run(tasks, *words, options) == 2
        assert message in capsys.readouterr().err


def test_some_real_pictures(data, tmp_path):
    """Twenty photographs that are named by numbers of classes. Two correct ones by chance would be very unlikely."""
    words = f"--eval_only --max_eval_samples 20 --eval_data {data}/images/imagenet1k-sample-256px.zip --use_cpu"
    words += f" --model {data}/models/deit-tiny-imagenet --output_dir {tmp_path / 'out'}"
    report = imagenet.run(words.split())
    assert report["metrics"]["eval_top1"] >= 0.6 and report["metrics"]["eval_top5"] >= 0.8
