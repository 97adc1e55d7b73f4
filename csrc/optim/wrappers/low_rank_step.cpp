#include "optim/wrappers/low_rank_step.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <c10/util/accumulate.h>

#include "optim/core/norm.h"
#include "optim/split/all_reduce.h"
#include "optim/wrappers/subspace.h"

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

std::vector<std::pair<Box, Tensor>> Projected::boxes(const Tensor& of) const {
  const SplitParameter* part = split();
  if (part == nullptr) return {{{0, 1, 0, rows, 0, columns}, of}};
  auto parts = boxes_of(of, *part, rows, columns);
  for (auto& [box, elements] : parts) elements = elements.flatten(0, 1);  // there is one matrix
  return parts;
}

std::vector<Tensor> LowRankStep::add(const std::vector<Tensor>& params, const LowRankOptions& o) {
  Group added;
  added.options = o;
  added.params = params;
  // Index of the next parameter in the optimizer. It is hashed into the parameter's seed, so that no two
  // parameters get the same random numbers.
  int64_t number = 0;
  for (const Group& g : groups) number += static_cast<int64_t>(g.params.size());
  std::vector<Tensor> lows;
  for (const Tensor& p : params) {
    const int64_t param_number = number++;
    const at::IntArrayRef sizes = whole_sizes(p);
    const int64_t numel = c10::multiply_integers(sizes);
    const bool matrix = sizes.size() > 1 && numel > 0;
    const int64_t rows = matrix ? sizes[0] : 0, columns = matrix ? numel / rows : 0;
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
    added.projected.push_back({p, low, rows, columns, left, mix({o.seed, param_number})});
  }
  groups.push_back(std::move(added));
  return lows;
}

void LowRankStep::replace_params(size_t group, const std::vector<Tensor>& params) {
  Group& g = groups.at(group);
  const auto replace = [&](Tensor& p) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (!p.is_same(g.params[i])) continue;
      if (const SplitParameter* split = split_of(p)) set_split(params[i], SplitParameter(*split));
      p = params[i];
      return;
    }
  };
  for (Tensor& p : g.plain) replace(p);
  for (Projected& p : g.projected) replace(p.param);
  g.params = params;
}

// Returns the norm of the gradients of all processes together, or an undefined tensor if there are none.
Tensor LowRankStep::norm_of(const std::vector<Tensor>& params) const {
  std::vector<Tensor> whole;
  ByGroups<Tensor> split;
  for (const Tensor& p : params) {
    const SplitParameter* of = split_of(p);
    of != nullptr ? split.add(*of, p.grad()) : whole.push_back(p.grad());
  }
  std::vector<Tensor> norms;
  if (!whole.empty()) norms.push_back(total_norm(whole));
  for (const auto& [of, grads] : split) {
    norms.push_back(total_norm(grads));
    combine({{.norms = {norms.back()}}}, *of);
  }
  if (norms.size() < 2) return norms.empty() ? Tensor() : norms[0];
  for (Tensor& norm : norms) norm = norm.to(norms[0].device());
  return at::linalg_vector_norm(at::stack(norms));
}

namespace {

// Returns the projection of the gradient, as far as this process's part of it counts.
Tensor projected(const Projected& p, const Tensor& basis) {
  const Tensor& grad = p.param.grad();
  if (p.split() == nullptr) return project(grad.flatten(1), basis, p.left);
  Tensor low = at::zeros(p.low.sizes(), p.low.options().requires_grad(false));
  for (const auto& [box, part] : p.boxes(grad)) {
    if (p.left) {
      low.narrow(1, box.column, box.columns) += project(part, basis.narrow(0, box.row, box.rows), true);
    } else {
      low.narrow(0, box.row, box.rows) += project(part, basis.narrow(0, box.column, box.columns), false);
    }
  }
  return low;
}

// Returns the norms of the channels of the gradient, as far as this process's part of it counts, or that of
// the whole gradient if scale_type is "tensor". A channel extends along the dimension that the projection
// reduces.
Tensor lengths(const Projected& p, const LowRankOptions& o) {
  const int64_t along = p.left ? 0 : 1;
  const bool by_channel = o.kind == "channel";
  const auto norm = [&](const Tensor& x) {
    const auto dim = by_channel ? at::OptionalIntArrayRef(at::IntArrayRef(along)) : at::OptionalIntArrayRef();
    return at::linalg_vector_norm(x, 2, dim, /*keepdim=*/true, at::kFloat);
  };
  const Tensor& grad = p.param.grad();
  if (p.split() == nullptr) return norm(grad.flatten(1));
  const auto shape = !by_channel ? std::vector<int64_t>{1, 1}
                     : p.left    ? std::vector<int64_t>{1, p.columns}
                                 : std::vector<int64_t>{p.rows, 1};
  const Tensor squares = at::zeros(shape, grad.options().dtype(at::kFloat));
  for (const auto& [box, part] : p.boxes(grad)) {
    Tensor channel_squares = squares;
    if (by_channel)
      channel_squares =
          p.left ? squares.narrow(1, box.column, box.columns) : squares.narrow(0, box.row, box.rows);
    channel_squares += norm(part).square();
  }
  return squares.sqrt();
}

}  // namespace

// Gives each stand-in its gradient.
void LowRankStep::project_gradients() {
  std::vector<Renewed> old;
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      const bool is_old = !p.kept.defined() || p.age >= g.options.update_proj_gap;
      if (is_old && p.param.grad().defined()) old.push_back({&p, &g.options});
    }
  }
  method.renew(old);
  ByGroups<Partial> split;
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      if (!p.param.grad().defined()) continue;
      ++p.age;
      const Tensor low_grad = projected(p, method.basis(p, g.options));
      Partial part{.sums = {low_grad}};
      if (method.needs_lengths) part.norms.push_back(p.lengths = lengths(p, g.options));
      if (const SplitParameter* of = p.split()) split.add(*of, std::move(part));
      p.low.set_data(at::zeros_like(low_grad));
      p.low.mutable_grad() = low_grad;
    }
  }
  for (const auto& [of, parts] : split) combine(parts, *of);
}

Tensor LowRankStep::begin(std::optional<double> max_grad_norm) {
  std::vector<Tensor> params;
  for (const Group& g : groups) {
    for (const Projected& p : g.projected) {
      const Tensor& grad = p.param.grad();
      if (!grad.defined()) continue;
      TORCH_CHECK_VALUE(
          low_shape(p.rows, p.columns, is_left(p.rows, p.columns, g.options), g.options.rank) ==
              p.low.sizes(),
          name,
          ": rank: expected the rank that the group was created with (and the same projection), received ",
          g.options.rank ? std::to_string(*g.options.rank) : "None");
      TORCH_CHECK_VALUE(!grad.is_sparse(), name, ": grad: expected a dense gradient, received a sparse one");
    }
    for (const Tensor& p : g.params) {
      if (p.grad().defined()) params.push_back(p);
    }
  }
  clip_ = Tensor();
  Tensor norm;
  if (max_grad_norm && !params.empty()) {
    norm = norm_of(params);
    clip_ = clip_coef(norm, *max_grad_norm);
  }
  project_gradients();
  if (!clip_.defined()) return norm;
  for (Group& g : groups) {
    for (Projected& p : g.projected) {
      if (p.low.grad().defined()) p.low.mutable_grad().mul_(clip_.to(p.low.device()));
    }
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
      p.lengths = Tensor();
      p.low.mutable_grad() = Tensor();
      free_memory(p.low);
    }
  }
}

}  // namespace shoestring::optim::detail
