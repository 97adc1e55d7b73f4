#include "optim/low_rank_step.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>

#include "optim/norm.h"
#include "optim/subspace.h"

namespace shoestring::optim::detail {
namespace {

// Returns the shape of the stand-in of a matrix (rows, columns), or of no projection an empty shape.
std::vector<int64_t> low_shape(int64_t rows, int64_t columns, bool left, const std::optional<int64_t>& rank) {
  if (!rank || *rank > (left ? rows : columns)) return {};
  return left ? std::vector<int64_t>{*rank, columns} : std::vector<int64_t>{rows, *rank};
}

bool is_left(int64_t rows, int64_t columns, const LowRankOptions& o) {
  return o.kind == "left" || (o.kind != "right" && rows <= columns);
}

// Frees the memory of a stand-in. It keeps its shape.
void free_memory(Tensor& low) {
  Tensor empty = at::empty({0}, low.options().requires_grad(false));
  empty.unsafeGetTensorImpl()->set_sizes_contiguous(low.sizes());
  low.set_data(empty);
}

// Returns the number as a tensor that promotes dtypes as a C++ number does.
Tensor number(double x) { return at::native::wrapped_scalar_tensor(x); }

}  // namespace

Tensor BaseOptions::rate() const { return lr_tensor.defined() ? lr_tensor : number(lr); }

Tensor BaseOptions::kept_weight() const {
  if (weight_decay == 0) return {};
  return lr_tensor.defined() ? 1 - lr_tensor * weight_decay : number(1 - lr * weight_decay);
}

std::vector<Tensor> LowRankStep::add(const std::vector<Tensor>& params, const LowRankOptions& o) {
  Group added{o, {}, params};
  // Index of the next parameter in the optimizer. It is hashed into the parameter's seed, so that no two
  // parameters get the same random numbers.
  int64_t number = 0;
  for (const Group& g : groups) number += static_cast<int64_t>(g.params.size());
  std::vector<Tensor> lows;
  for (const Tensor& p : params) {
    const int64_t own = number++;
    const bool matrix = p.dim() > 1 && p.numel() > 0;
    const int64_t rows = matrix ? p.size(0) : 0, columns = matrix ? p.numel() / rows : 0;
    const bool left = is_left(rows, columns, o);
    const auto shape = low_shape(rows, columns, left, o.rank);
    Tensor& low = lows.emplace_back();
    if (!matrix || shape.empty()) {
      added.plain.push_back(p);
      continue;
    }
    low = at::empty({0}, p.options().dtype(at::kFloat).requires_grad(false));
    low.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    low.requires_grad_();
    added.projected.push_back({p, low, left, {}, 0, mix({o.seed, own})});
  }
  groups.push_back(std::move(added));
  return lows;
}

Tensor LowRankStep::begin(std::optional<double> max_grad_norm) {
  std::vector<Tensor> grads;
  for (const Group& g : groups) {
    for (const Projected& p : g.projected) {
      const Tensor& grad = p.param.grad();
      if (!grad.defined()) continue;
      const int64_t rows = p.param.size(0), columns = p.param.numel() / rows;
      TORCH_CHECK_VALUE(
          low_shape(rows, columns, is_left(rows, columns, g.options), g.options.rank) == p.low.sizes(), name,
          ": rank: expected the rank that the group was created with (and the same projection), received ",
          g.options.rank ? std::to_string(*g.options.rank) : "None");
      TORCH_CHECK_VALUE(!grad.is_sparse(), name, ": grad: expected a dense gradient, received a sparse one");
    }
    for (const Tensor& p : g.params) {
      if (p.grad().defined()) grads.push_back(p.grad());
    }
  }
  clip_ = Tensor();
  Tensor norm;
  if (max_grad_norm && !grads.empty()) {
    norm = total_norm(grads);
    clip_ = clip_coef(norm, *max_grad_norm);
  }
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      const Tensor& grad = p.param.grad();
      if (!grad.defined()) continue;
      const Tensor low_grad = method.down(p, grad.flatten(1), g.options);
      if (clip_.defined()) low_grad.mul_(clip_.to(low_grad.device()));
      p.low.set_data(at::zeros_like(low_grad));
      p.low.mutable_grad() = low_grad;
    }
    if (!clip_.defined()) continue;
    for (Tensor& p : g.plain) {
      if (!p.grad().defined()) continue;
      given_.emplace_back(p, p.grad());
      p.mutable_grad() = (p.grad() * clip_.to(p.device())).to(p.grad().scalar_type());
    }
  }
  return norm;
}

void LowRankStep::finish() {
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      if (!p.low.grad().defined()) continue;
      BaseOptions base = g.base;
      if (base.lr_tensor.defined() && base.lr_tensor.device() != p.param.device()) {
        base.lr = std::exchange(base.lr_tensor, Tensor()).item<double>();
      }
      method.up(p, clip_.defined() ? clip_.to(p.param.device()) : clip_, g.options, base);
    }
  }
}

void LowRankStep::release() {
  for (auto& [p, grad] : given_) p.mutable_grad() = grad;
  given_.clear();
  clip_ = Tensor();
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      p.low.mutable_grad() = Tensor();
      free_memory(p.low);
    }
  }
}

}  // namespace shoestring::optim::detail
