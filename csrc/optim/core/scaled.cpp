#include "optim/core/scaled.h"

#include <map>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

namespace shoestring::optim::detail {

LowMemoryOptimizer* divides_within_step(torch::optim::Optimizer& optimizer) {
  if (auto* sam = dynamic_cast<SAM*>(&optimizer)) return divides_within_step(sam->base());
  return dynamic_cast<LowMemoryOptimizer*>(&optimizer);
}

std::vector<Tensor> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor& g = p.grad();
      if (g.defined()) gradients.push_back(g.is_sparse() ? g._values() : g);
    }
  }
  return gradients;
}

Tensor unscale(const torch::optim::Optimizer& optimizer, const Tensor& scale) {
  // The ATen operator takes gradients of one device and one dtype.
  std::map<std::pair<std::string, at::ScalarType>, std::vector<Tensor>> lists;
  for (const Tensor& grad : gradients_of(optimizer)) {
    expect(grad.scalar_type() != at::kHalf, "GradScaler", "unscale_",
           "fp32, bf16 or fp64 gradients to divide by the scale",
           "fp16 gradients. Keep the parameters in fp32 and use AutocastGuard.");
    lists[{grad.device().str(), grad.scalar_type()}].push_back(grad);
  }
  const at::NoGradGuard no_grad;
  // The reciprocal is computed in fp64, as in Python, because fp32 division is not exact on every device. MPS
  // has no fp64.
  const Tensor inverse =
      scale.is_mps() ? scale.reciprocal() : scale.to(at::kDouble).reciprocal().to(at::kFloat);
  Tensor found_inf;
  for (auto& [key, grads] : lists) {
    const at::Device device = grads[0].device();
    Tensor found_inf_here = at::zeros({}, scale.options().device(device));
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf_here, number_on(device, inverse));
    found_inf = either(found_inf, number_on(scale.device(), found_inf_here));
  }
  return found_inf;
}

Tensor either(const Tensor& found_inf, const Tensor& other) {
  if (!found_inf.defined() || !other.defined()) return found_inf.defined() ? found_inf : other;
  return at::maximum(found_inf.reshape({}), number_on(found_inf.device(), other.reshape({})));
}

Tensor scaled_step(torch::optim::Optimizer& optimizer, const Tensor& scale, const Tensor& found_inf) {
  if (auto* sam = dynamic_cast<SAM*>(&optimizer)) return sam->scaled_step(scale, found_inf);
  if (auto* low_memory = dynamic_cast<LowMemoryOptimizer*>(&optimizer))
    return low_memory->scaled_step(scale, found_inf);
  Tensor skip = found_inf;
  if (scale.defined()) skip = either(either(at::zeros({}, scale.options()), unscale(optimizer, scale)), skip);
  expect(skip.defined(), "GradScaler", "found_inf", "one number if the gradients are divided already",
         "none");
  if (skip.item<float>() == 0) optimizer.step();
  return skip;
}

}  // namespace shoestring::optim::detail
