import pytest
import torch
from torch import nn

import shoestring
from shoestring.nn import swap_head


class Classifier(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.classifier = nn.ModuleDict({"out": head})


def test_the_new_layer_is_like_the_old_one() -> None:
    for old, made in (
        (
            nn.Linear(8, 5, bias=False, dtype=torch.bfloat16),
            "Linear(in_features=8, out_features=3, bias=False)",
        ),
        (nn.Linear(8, 5, device="meta"), "Linear(in_features=8, out_features=3, bias=True)"),
        (shoestring.nn.Linear(8, 5), "Linear(in_features=8, out_features=3, bias=True)"),
        (
            nn.Conv2d(8, 5, 1, padding=1, padding_mode="reflect", dtype=torch.float64),
            "Conv2d(8, 3, kernel_size=(1, 1), stride=(1, 1), padding=(1, 1), padding_mode=reflect)",
        ),
    ):
        old.requires_grad_(False).eval()
        model = Classifier(old)
        new = swap_head(model, "classifier.out", 3)
        assert model.classifier["out"] is new and type(new) is type(old)
        assert repr(new) == made
        assert new.weight.dtype == old.weight.dtype and new.weight.device == old.weight.device
        assert all(p.requires_grad for p in new.parameters()) and not new.training
        assert set(dict(model.named_modules())) == set(dict(Classifier(old).named_modules()))


def test_initialisation_and_shared_classes() -> None:
    old = nn.Linear(64, 10)
    model = Classifier(old)
    new = swap_head(model, old, 4, keep={0: 9, 2: 0})
    assert torch.equal(new.weight[[0, 2]], old.weight[[9, 0]])
    assert torch.equal(new.bias[[0, 2]], old.bias[[9, 0]])
    assert new.weight[1].abs().max() <= 1 / 8  # nn.Linear draws from +-1/sqrt(in_features)
    again = swap_head(model, "classifier.out", 2, init=lambda layer: nn.init.zeros_(layer.weight))
    assert not again.weight.any()
    x = torch.randn(3, 64)
    assert again(x).shape == (3, 2)


def test_a_head_at_two_places() -> None:
    """A layer that is registered twice is replaced twice."""
    head = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": head, "b": head})
    new = swap_head(model, "a", 2)
    assert model["a"] is new and model["b"] is new


def test_errors() -> None:
    model = Classifier(nn.Linear(8, 5))
    before = model.classifier["out"]
    for arguments, message in (
        (
            ("classifer.out", 3),
            "head: expected a layer of the model, received 'classifer.out'. Similar names are cl",
        ),
        (("", 3), "head: expected a layer of the model, received ''. The names are classifier.out, body.0"),
        (
            (nn.Linear(2, 2), 3),
            "head: expected a layer of the model, received Linear. The names are classifier.o",
        ),
        (("body.1", 3), "head: expected an nn.Linear or a convolution without groups, received ReLU"),
        (("classifier.out", 0), "classes: expected a number of at least 1, received 0"),
    ):
        with pytest.raises(ValueError, match="swap_head: " + message):
            swap_head(model, *arguments)
    for keep in ({3: 0}, {0: 5}, {-1: 0}):
        with pytest.raises(
            ValueError, match="swap_head: keep: expected new indices below 3 and old ones below 5"
        ):
            swap_head(model, "classifier.out", 3, keep=keep)
    assert model.classifier["out"] is before
    tied = nn.ModuleDict({"tokens": nn.Embedding(5, 8), "head": nn.Linear(8, 5, bias=False)})
    tied["head"].weight = tied["tokens"].weight
    with pytest.raises(
        ValueError, match="swap_head: head: expected a layer with weights of its own, received one "
    ):
        swap_head(tied, "head", 3)
    for other in (nn.Conv2d(8, 4, 1, groups=2), nn.Embedding(5, 8)):
        with pytest.raises(
            ValueError, match="swap_head: head: expected an nn.Linear or a convolution without"
        ):
            swap_head(nn.Sequential(other), "0", 3)
    weighted = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)))
    with pytest.raises(
        ValueError, match="swap_head: head: expected an nn.Linear or a convolution without groups"
    ):
        swap_head(weighted, "0", 3)
