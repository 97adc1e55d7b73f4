// Dropout. The CPU's kernel of native_dropout takes no generator, so the operator is composed of others here,
// as dropout is on the CPU.

#include <optional>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/library.h>

namespace simdev {
namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0)
    return {x.clone(), at::empty_like(x, x.options().dtype(at::kBool)).fill_(true)};
  at::Tensor noise = at::empty_like(x).bernoulli_(1 - p);
  at::Tensor mask = noise.to(at::kBool);
  if (p < 1) noise.div_(1 - p);
  return {x * noise, mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", native_dropout); }

}  // namespace
}  // namespace simdev
