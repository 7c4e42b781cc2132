"""Inputs from several texts."""

import pytest

from hf_efficient_attn.evaluation.data import read_texts, tokens_of


def letters(text):
    """One token per letter."""
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("texts", "length", "rows", "expected"),
    [
        (["abcdefgh"], 3, 2, ["abc", "def"]),
        (["abcdefgh"], 3, 3, ["abc", "def", "gh"]),
        (["aaabbbccc", "123456"], 3, 5, ["aaa", "123", "bbb", "456", "ccc"]),
        (["aaabbbc", "1", "xyz"], 3, 9, ["aaa", "xyz", "bbb", "c1"]),
        (["a" * 500, "b" * 2, "c" * 500], 4, 8, ["aaaa", "cccc"] * 4),
    ],
)
def test_inputs_come_from_all_texts_in_turn(texts, length, rows, expected):
    tokens = "".join(map(chr, tokens_of(texts, letters, length, rows).tolist()))
    assert [tokens[start : start + length] for start in range(0, len(tokens), length)][:rows] == expected


def test_no_more_is_tokenized_than_needed():
    read = []
    tokens_of(["a" * 10_000, "b" * 10, "c" * 10_000], lambda text: read.append(text) or letters(text), 5, 4)
    assert [len(text) for text in read] == [155, 10, 155]
    tokens_of(["a" * 10_000], lambda text: read.append(text) or letters(text), 5, 4)
    assert len(read[-1]) == 16 * 5 * 4
    wide = f"a{' ' * 500}b"  # needs more
    assert tokens_of([wide], lambda text: letters(text.replace(" ", "")), 2, 1).tolist() == letters("ab")


def test_files_and_folders(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "folder" / "inner" / f"{number}.txt").write_text(str(number) * 100)
    (tmp_path / "folder" / "notes.pdf").write_bytes(b"%PDF")
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n{"text": "two", "more": 3}')
    (tmp_path / "other").write_text("other")  # a file that is named may have any ending
    files = [tmp_path / name for name in ("folder", "one.jsonl", "other")]
    every = read_texts(files, 10, 100)
    assert sorted(every) == sorted([*(str(number) * 100 for number in range(9)), "one\n\ntwo", "other"])
    few = read_texts(files, 2, 3)
    assert few == every[: len(few)] and 3 <= len(few) < 6
