#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/low_rank_step.h"
#include "optim/subspace.h"

namespace shoestring::optim::detail {
namespace {

// Upper bound of the norm of a parameter's update, divided by the norm of its previous update (from the
// APOLLO paper).
constexpr double kNormGrowth = 1.01;

std::pair<at::ScalarType, std::vector<int64_t>> norm_as(const Projected&, const LowRankOptions&) {
  return {at::kFloat, {}};
}

Tensor apollo_down(Projected& p, const Tensor& grad, const LowRankOptions& o) {
  if (!p.kept.defined()) {
    p.kept = at::zeros({}, grad.options().dtype(at::kFloat));
  } else if (p.age >= o.update_proj_gap) {
    p.age = 0;
    p.seed = mix({p.seed});
  }
  ++p.age;
  const Tensor basis = normal(p.left ? grad.size(0) : grad.size(1), *o.rank, p.seed, grad.device());
  return project(grad, basis / std::sqrt(static_cast<double>(*o.rank)), p.left);
}

void apollo_up(Projected& p, const Tensor& clip, const LowRankOptions& o, const BaseOptions& base) {
  const Tensor grad = p.param.grad().flatten(1);
  // Returns the norm of each channel of x, or of the whole matrix x if scale_type is "tensor". A channel
  // extends along the dimension that the projection reduces.
  const auto norm = [&](const Tensor& x) {
    at::OptionalIntArrayRef dim;
    const int64_t along = p.left ? 0 : 1;
    if (o.kind == "channel") dim = at::IntArrayRef(along);
    return at::linalg_vector_norm(x, 2, dim, /*keepdim=*/true, at::kFloat);
  };
  const Tensor below = norm(p.low.grad());
  Tensor factor = at::where(below == 0, 0.0, norm(p.low.detach()) / below);
  if (clip.defined()) factor = factor * clip;
  const Tensor size = at::linalg_vector_norm(factor * norm(grad));
  const Tensor limit = at::where(p.kept == 0, 1.0, (kNormGrowth * p.kept / size).clamp_max(1)).to(at::kFloat);
  p.kept.copy_(size * limit);
  factor.mul_(limit * (base.maximize ? 1.0 : -1.0) * o.scale * base.rate());
  change_rows(p.param, base.kept_weight(), [&](int64_t first, int64_t count, const Tensor& rows) {
    const bool by_row = o.kind == "channel" && !p.left;
    rows.addcmul_(grad.narrow(0, first, count).to(at::kFloat),
                  by_row ? factor.narrow(0, first, count) : factor);
  });
}

}  // namespace

const Method& apollo() {
  static const Method method{"APOLLO", "scale_type", "norm",   true, {"channel", "tensor"},
                             norm_as,  apollo_down,  apollo_up};
  return method;
}

}  // namespace shoestring::optim::detail
