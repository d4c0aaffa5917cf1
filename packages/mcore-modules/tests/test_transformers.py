"""The Trainer of transformers with our modules."""

from types import SimpleNamespace

import pytest
import torch

from mcore.modules import Float16Module, MegatronModule

BF16 = SimpleNamespace(bf16=True)


class Model(MegatronModule):
    def __init__(self):
        super().__init__(BF16)
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("make", [Model, lambda: Float16Module(BF16, Model())])
def test_biases_and_norms_are_not_decayed(make, tmp_path):
    transformers = pytest.importorskip("transformers")  # absent in isolated installations
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True
    )
    optimizer = transformers.Trainer(model=make(), args=arguments).create_optimizer()
    sizes = {
        group["weight_decay"]: sum(param.numel() for param in group["params"])
        for group in optimizer.param_groups
    }
    assert sizes == {0.1: 16, 0.0: 12}
