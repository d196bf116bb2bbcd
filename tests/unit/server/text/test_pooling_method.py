"""Which pooling a checkpoint asks for, from the files that sentence-transformers leaves in it."""

from __future__ import annotations

import json

import pytest

from quire_server.answering.vectors import _cut
from quire_server.text.pooling_method import pooling_method

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def checkpoint(path, *modules, pooling=None):
    listed = [{"idx": i, "name": str(i), "path": where, "type": kind} for i, (kind, where) in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def standard(path, pooling, prefix=OLD):
    modules = ((f"{prefix}Transformer", ""), (f"{prefix}Pooling", "1_Pooling"), (f"{prefix}Normalize", "2_Normalize"))
    return checkpoint(path, *modules, pooling=pooling)


def test_without_files_it_is_the_last_token(tmp_path):
    assert pooling_method("auto", tmp_path).name == "last"


@pytest.mark.parametrize("prefix", [OLD, NEW])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode_cls_token": True}, "none"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "none"),
        ({}, "none"),
        ([], "none"),
    ],
)
def test_the_checkpoint_s_own(tmp_path, config, name, prefix):
    assert pooling_method("auto", standard(tmp_path, config, prefix)).name == name


def test_a_layer_behind_the_pooling_is_not_left_out(tmp_path):
    path = checkpoint(tmp_path, (f"{OLD}Transformer", ""), (f"{OLD}Dense", "2_Dense"))
    method = pooling_method("auto", path)
    assert method.name == "none"
    assert "Dense" in method.reason


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "null", "[" * 100_000])
def test_files_that_cannot_be_read_are_a_reason_and_no_crash(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    assert pooling_method("auto", tmp_path).name == "none"


def test_a_module_s_path_stays_in_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"pooling_mode": "mean"}')
    inner = tmp_path / "model"
    inner.mkdir()
    method = pooling_method("auto", checkpoint(inner, (f"{OLD}Pooling", "..")))
    assert method.name == "none"


@pytest.mark.parametrize("asked", ["last", "mean", "none"])
def test_the_operator_s_word_counts(tmp_path, asked):
    path = standard(tmp_path, {"pooling_mode_cls_token": True})
    assert pooling_method(asked, path).name == asked


@pytest.mark.parametrize(
    ("whole", "plain", "keep", "start", "end"),
    [
        ([1, 5, 6, 7, 2], [5, 6, 7], 4, [1, 5, 6, 2], [1, 6, 7, 2]),
        ([5, 6, 7, 2], [5, 6, 7], 3, [5, 6, 2], [6, 7, 2]),
        ([1, 5, 6, 7], [5, 6, 7], 2, [1, 5], [1, 7]),
        ([5, 6, 7], [5, 6, 7], 2, [5, 6], [6, 7]),
        ([1, 5, 6, 7, 2], [5, 6, 7], 2, [1, 5], [7, 2]),  # no room for a text between them
        ([1, 9, 7], [5, 6], 2, [1, 9], [9, 7]),  # the text alone is other tokens
    ],
)
def test_a_text_that_is_cut_keeps_its_special_tokens(whole, plain, keep, start, end):
    assert _cut(whole, plain, keep, keep_start=True) == start
    assert _cut(whole, plain, keep, keep_start=False) == end
