"""Inputs from several texts."""

from itertools import islice

import pytest

from hf_efficient_attn.evaluation.data import opened_texts, windows_of


def letters(text):
    """One token per letter."""
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("texts", "length", "expected"),
    [
        (["abcdefgh"], 3, ["abc", "def", "gh"]),
        (["aaabbbccc", "123456"], 3, ["aaa", "123", "bbb", "456", "ccc"]),
        (["aaabbbc", "1", "xyz"], 3, ["aaa", "xyz", "bbb", "1c"]),
        (["ab"] * 64 + ["xyz"], 3, [*["aba", "bab"] * 21, "xyz", "ab"]),
        (["a" * (1 << 20), "b"], 1 << 19, ["a" * (1 << 19)] * 2 + ["b"]),
    ],
)
def test_inputs_come_from_all_texts_in_turn(texts, length, expected):
    assert ["".join(map(chr, window)) for window in windows_of(texts, letters, length)] == expected


def test_no_more_is_read_than_needed():
    read = []
    texts = ["a" * (1 << 21)] * 2 + [" " * (1 << 21)] * 62 + ["never read"]
    few = islice(windows_of(texts, lambda text: read.append(len(text)) or letters(text.strip()), 5), 4)
    assert len(list(few)) == 4 and read == [1 << 20] * 2 + [1 << 20] * 124


def test_files_and_folders(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "folder" / "inner" / f"{number}.txt").write_text(str(number) * 100)
    (tmp_path / "folder" / "notes.pdf").write_bytes(b"%PDF")
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n{"text": "two \\ud83d", "more": 3}')
    (tmp_path / "other").write_text("other")  # a file that is named may have any ending
    every = list(opened_texts([tmp_path / name for name in ("folder", "one.jsonl", "other")]))
    assert sorted(every) == sorted([*(str(number) * 100 for number in range(9)), "one\n\ntwo ?", "other"])
