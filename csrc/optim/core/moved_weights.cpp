#include "optim/core/moved_weights.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::optim {
namespace detail {
namespace {

// Returns the gradient, or for ASAM gradient times weight, with at least fp32 precision. SAM divides by the
// norm of these tensors. They are not kept, because they would take memory of the size of all gradients.
Tensor weighted(const Tensor& p, bool adaptive) {
  const Tensor grad = p.grad().to(at::promote_types(p.scalar_type(), at::kFloat));
  return adaptive ? grad * p : grad;
}

}  // namespace

MovedWeights::MovedWeights(const std::vector<Tensor>& params) {
  const at::NoGradGuard no_grad;
  for (const Tensor& p : params) weights_.emplace_back(p, p.clone());
}

void MovedWeights::move(const std::vector<double>& rho, const std::vector<bool>& adaptive) {
  const at::NoGradGuard no_grad;
  if (weights_.empty()) return;
  std::vector<Tensor> norms;
  const at::Device device = weights_[0].first.device();
  for (size_t i = 0; i < weights_.size(); ++i) {
    norms.push_back(at::linalg_vector_norm(weighted(weights_[i].first, adaptive[i])).to(device));
  }
  const Tensor norm = at::linalg_vector_norm(at::stack(norms));
  finite_ = norm.isfinite();
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Tensor& p = weights_[i].first;
    Tensor up = weighted(p, adaptive[i]);
    up = up * (rho[i] / (norm + 1e-12)).to(p.device(), up.scalar_type());
    if (adaptive[i]) up = up * p;
    // If the norm is not finite, some gradient may contain inf or NaN.
    p.copy_(p + at::where(finite_.to(p.device()), up, 0.0));
  }
}

void MovedWeights::go_back() {
  const at::NoGradGuard no_grad;
  for (auto& [p, weight] : weights_) p.copy_(weight);
  weights_.clear();
}

}  // namespace detail

namespace {

// The class with which Python's SAM moves weights.
struct MovedWeightsHolder : torch::CustomClassHolder {
  explicit MovedWeightsHolder(const std::vector<at::Tensor>& params) : weights(params) {}
  void move(const std::vector<double>& rho, const c10::List<bool>& adaptive) {
    weights.move(rho, adaptive.vec());
  }
  void go_back() { weights.go_back(); }
  std::optional<at::Tensor> finite() {
    return weights.finite().defined() ? std::optional<at::Tensor>(weights.finite()) : std::nullopt;
  }

  detail::MovedWeights weights;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<MovedWeightsHolder>("MovedWeights")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("move", &MovedWeightsHolder::move)
      .def("go_back", &MovedWeightsHolder::go_back)
      .def("finite", &MovedWeightsHolder::finite);
}

}  // namespace shoestring::optim
