import copy

import pytest
import torch
from torch import Tensor, nn

from shoestring.nn import fold_bias_before_batch_norm


class Network(nn.Module):
    """Layers whose biases may go, and layers whose biases must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 1)
        self.up_norm = nn.BatchNorm2d(8, affine=False)
        self.branch = nn.Conv2d(8, 8, 1)  # its result is used twice
        self.branch_norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)  # it is called twice
        self.twice_norm = nn.BatchNorm2d(8)
        self.plain = nn.Conv2d(8, 8, 1)  # no batch norm follows
        self.head = nn.Linear(8, 6)
        self.head_norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_norm(self.up(self.stem(x)))
        y = self.branch(x)
        x = self.branch_norm(y) + y
        x = self.twice_norm(self.twice(self.twice(x)))
        x = self.plain(x).relu().mean((2, 3))
        return self.head_norm(self.head(x))


def prepared(model: nn.Module, x: Tensor) -> nn.Module:
    """Give batch norms running statistics, and biases other values than 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-2, 2)
        for _ in range(3):
            model(x)
    return model


def test_outputs_stay_and_gradients_of_the_rest_too() -> None:
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    model = prepared(Network().double(), x)
    plain = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    report = fold_bias_before_batch_norm(model, x)
    assert report.folded == {"stem.0": "stem.1", "up": "up_norm", "head": "head_norm"}
    assert report.kept == {}
    assert [module.training for module in model.modules()] == modes
    assert model.stem[0].bias is None and model.branch.bias is not None and model.twice.bias is not None
    for training in (False, True):
        for m in (model, plain):
            m.train(training)
            m.zero_grad()
        ours, exact = model(x), plain(x)
        torch.testing.assert_close(ours, exact)
        weight = torch.randn_like(ours)
        (ours * weight).sum().backward()
        (exact * weight).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            torch.testing.assert_close(buffer, plain.get_buffer(name))


def test_linear_layers_need_an_example() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    reason = "no example shows that the batch norm normalises the features"
    assert fold_bias_before_batch_norm(model).kept == {"0": reason}
    sequence = torch.randn(3, 6, 4)  # of (batch, 6 tokens, 4 features), batch norm normalises each token
    reason = "the batch norm normalises another dimension than the features"
    assert fold_bias_before_batch_norm(model, sequence).kept == {"0": reason}
    assert fold_bias_before_batch_norm(model, (torch.randn(3, 4),)).folded == {"0": "1"}
    assert fold_bias_before_batch_norm(model, torch.randn(3, 4)).folded == {}


def test_batch_norm_without_statistics_and_in_bf16() -> None:
    x = torch.randn(4, 3, 6, 6)
    model = prepared(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, track_running_stats=False)), x
    ).eval()
    before = model(x)
    fold_bias_before_batch_norm(model)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    low = nn.Sequential(nn.Conv2d(3, 5, 3).bfloat16(), nn.BatchNorm2d(5))
    bias = low[0].bias.detach().clone()
    fold_bias_before_batch_norm(low)
    assert torch.equal(low[1].running_mean, -bias.float())


class Hidden(nn.Module):
    """A model whose forward reads a layer's bias itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) + self.conv.bias.view(-1, 1, 1)


class Branching(nn.Module):
    """A model whose result in evaluation skips the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(x) if self.training else x


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def test_doubtful_models_keep_their_biases() -> None:
    for model in (Hidden(), Branching()):
        report = fold_bias_before_batch_norm(model)
        assert report.folded == {} and model.conv.bias is not None
    hooked = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    hooked[0].register_forward_hook(lambda *_: None)
    assert fold_bias_before_batch_norm(hooked).kept == {"0": "a hook sees the layer's result"}
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4))
    assert not fold_bias_before_batch_norm(normed).folded and normed[0].bias is not None
    tied = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.ReLU())
    tied[2].bias = tied[0].bias
    report = fold_bias_before_batch_norm(tied)
    assert report.kept == {"0": "another layer has the same bias"}
    model = Dynamic()
    with pytest.raises(
        ValueError, match="fold_bias_before_batch_norm: model: expected a model that torch.fx can tr"
    ):
        fold_bias_before_batch_norm(model)
    assert model.conv.bias is not None and model.training
