"""A kind of object with another encoding: saves, loads, checks and the command line."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedObject,
    describe_shards,
    load_sharded_state_dict,
    save_sharded_state_dict,
    validate_plans,
)
from mcore.parallel.checkpoint.__main__ import main


class Text(ShardedObject):
    kind: ClassVar[str] = "text"
    mark: ClassVar[str] = "testtext"
    is_archive: ClassVar[bool] = False

    def encode(self, *, weights_only=True):
        return self.data.encode()

    @classmethod
    def decode(cls, content, *, weights_only=True):
        return content.read().decode()


def texts(*values):
    return {"t": [Text("t", one, (len(values),), (n,)) for n, one in enumerate(values)]}


@pytest.mark.parametrize("async_", [False, True])
def test_another_kind_of_object_is_stored_in_its_form(tmp_path, async_):
    path = tmp_path / "step_1"
    handle = save_sharded_state_dict(texts("h\xe9llo", "b"), path, async_=async_)
    if handle is not None:
        handle.result()
    content = b"".join(file.read_bytes() for file in path.glob("*.distcp"))
    assert "h\xe9llo".encode() in content
    assert b"PK" not in content
    assert load_sharded_state_dict(texts(None, None), path) == {"t": ["h\xe9llo", "b"]}
    with pytest.raises(CheckpointingException, match="key 't/shard_0_2' is missing"):
        load_sharded_state_dict({"t": ShardedObject("t", None, (2,), (0,))}, path)


def test_the_command_line_reads_another_kind_of_object(tmp_path, capsys):
    for name, text in (("one", "a"), ("other", "c")):
        save_sharded_state_dict(texts(text, "b"), tmp_path / name)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert main(["ls", "--json", one]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert [(key["key"], key["dtype"]) for key in keys] == [
        ("t/testtext_0_2", "text"),
        ("t/testtext_1_2", "text"),
    ]
    assert main(["verify", one]) == 0
    assert main(["diff", one, other]) == 1
    assert "'a' -> 'c'" in capsys.readouterr().out
    assert main(["to-torch", one, str(tmp_path / "all.pt")]) == 0
    assert list(torch.load(tmp_path / "all.pt").values()) == ["a", "b"]


def test_kinds_of_one_key_and_missing_objects_are_found():
    plans = [describe_shards({"t": Text("k", "", (2,), (0,))}), describe_shards({"t": 1})]
    assert validate_plans(plans) == [
        "text 'k': 1 of 2 objects are written (some shard is on no rank)"
    ]
    plans[1] = describe_shards({"t": ShardedObject("k", "", (2,), (1,))})
    assert validate_plans(plans)[0].startswith("'k' names a object and a text entry")


def test_a_subclass_without_a_mark_is_stored_as_its_base(tmp_path):
    class Same(ShardedObject):
        """The same form."""

    save_sharded_state_dict({"o": Same("o", [1], (1,), (0,))}, tmp_path / "step_1")
    target = {"o": ShardedObject("o", None, (1,), (0,))}
    assert load_sharded_state_dict(target, tmp_path / "step_1") == {"o": [1]}
    assert ShardedObject.empty_from_unique_key("o/shard_0_1").key == "o"
    with pytest.raises(CheckpointingException, match="has the form 'KEY/testtext_OFFSET_SHAPE'"):
        Text.empty_from_unique_key("o/shard_0_1")
