#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/wrappers/low_rank_step.h"
#include "optim/wrappers/subspace.h"

namespace shoestring::optim::detail {
namespace {

// Upper bound of the norm of a parameter's update, divided by the norm of its previous update (from the
// APOLLO paper).
constexpr double kNormGrowth = 1.01;

std::pair<at::ScalarType, std::vector<int64_t>> norm_as(const Projected&, const LowRankOptions&) {
  return {at::kFloat, {}};
}

void apollo_renew(const std::vector<Renewed>& all) {
  for (const auto& [p, options] : all) {
    if (!p->kept.defined()) {
      p->kept = at::zeros({}, p->param.options().dtype(at::kFloat).requires_grad(false));
    } else {
      p->age = 0;
      p->seed = mix({p->seed});
    }
  }
}

Tensor apollo_basis(const Projected& p, const LowRankOptions& o) {
  const Tensor basis = normal(p.left ? p.rows : p.columns, *o.rank, p.seed, p.param.device());
  return basis / std::sqrt(static_cast<double>(*o.rank));
}

void apollo_up(const Projected& p, const Tensor& clip, const LowRankOptions& o, const BaseOptions& base) {
  // Returns the norm of each channel of a stand-in, or that of all of it if scale_type is "tensor".
  const auto norm = [&](const Tensor& x) {
    at::OptionalIntArrayRef dim;
    const int64_t along = p.left ? 0 : 1;
    if (o.kind == "channel") dim = at::IntArrayRef(along);
    return at::linalg_vector_norm(x, 2, dim, /*keepdim=*/true, at::kFloat);
  };
  const Tensor below = norm(p.low.grad());
  Tensor factor = at::where(below == 0, 0.0, norm(p.low.detach()) / below);
  if (clip.defined()) factor = factor * clip;
  const Tensor size = at::linalg_vector_norm(factor * p.lengths);
  const Tensor limit = at::where(p.kept == 0, 1.0, (kNormGrowth * p.kept / size).clamp_max(1)).to(at::kFloat);
  p.kept.copy_(size * limit);
  factor.mul_(limit * (base.maximize ? 1.0 : -1.0) * o.scale * base.rate());
  const auto weights = p.boxes(p.param), grads = p.boxes(p.param.grad());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Box& box = weights[i].first;
    const Tensor grad = grads[i].second.flatten(1);
    const bool by_row = o.kind == "channel" && !p.left, by_column = o.kind == "channel" && p.left;
    change_rows(weights[i].second, base.kept_weight(), [&](int64_t first, int64_t count, const Tensor& rows) {
      rows.addcmul_(grad.narrow(0, first, count).to(at::kFloat),
                    by_row      ? factor.narrow(0, box.row + first, count)
                    : by_column ? factor.narrow(1, box.column, box.columns)
                                : factor);
    });
  }
}

}  // namespace

const Method& apollo() {
  static const Method method{.name = "APOLLO",
                             .kind = "scale_type",
                             .kept = "norm",
                             .unit_lr = true,
                             .kinds = {"channel", "tensor"},
                             .needs_lengths = true,
                             .kept_as = norm_as,
                             .renew = apollo_renew,
                             .basis = apollo_basis,
                             .up = apollo_up};
  return method;
}

}  // namespace shoestring::optim::detail
