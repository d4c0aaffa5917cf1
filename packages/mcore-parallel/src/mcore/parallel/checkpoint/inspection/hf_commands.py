"""The commands ``to-hf`` and ``from-hf``. They have all converted tensors in memory together."""

from __future__ import annotations

from typing import Any

import torch

from mcore.parallel.checkpoint.files.index import read_index
from mcore.parallel.checkpoint.files.places import local_path, place_of
from mcore.parallel.checkpoint.hugging_face.hf_folder import load_hf, read_folder, save_hf
from mcore.parallel.checkpoint.load import load_sharded_state_dict
from mcore.parallel.checkpoint.save import save_sharded_state_dict


def to_hf(path: str, new: str, prefix: str, output: Any, **options: Any) -> int:
    """Write the tensors of a checkpoint whose keys start with ``prefix`` as a folder."""
    keys = [name for name in read_index(place_of(path)).keys if name.startswith(prefix)]
    found = load_sharded_state_dict(dict.fromkeys(keys), path, unexpected="ignore")
    save_hf(new, {name.removeprefix(prefix): one for name, one in found.items()}, **options)
    output.report({"new": new, "keys": keys}, [f"{new}: {len(keys)} tensors"])
    return 0


def from_hf(path: str, new: str, prefix: str, output: Any) -> int:
    """Write the tensors of a folder as a checkpoint, with keys that start with ``prefix``."""
    stored = read_folder(local_path(path)).keys
    state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    load_hf(path, state)
    renamed = {prefix + name: tensor for name, tensor in state.items()}
    save_sharded_state_dict(renamed, new)
    output.report({"new": new, "keys": [*renamed]}, [f"{new}: {len(renamed)} tensors"])
    return 0
