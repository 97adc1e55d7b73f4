#include <cmath>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/low_rank_step.h"
#include "optim/subspace.h"

namespace shoestring::optim::detail {
namespace {

std::pair<at::ScalarType, std::vector<int64_t>> projection_as(const Projected& p, const LowRankOptions& o) {
  return {p.param.scalar_type(), {p.left ? p.param.size(0) : p.param.numel() / p.param.size(0), *o.rank}};
}

// Computes a new projection matrix for GaLore. If the gradient is zero or not finite, keeps the old
// projection (or starts with a random one), and tries again in the next step.
void renew(Projected& p, const Tensor& grad, const LowRankOptions& o) {
  const double largest = at::linalg_vector_norm(grad, INFINITY).item<double>();
  const Tensor matrix = p.left ? grad : grad.mT();
  if (largest > 0 && std::isfinite(largest)) {
    Tensor basis = leading_vectors(matrix.to(at::kFloat), *o.rank, p.seed);
    // The sign of a singular vector is arbitrary. Here it follows the old projection, so that the first
    // moments, computed with the old projection, stay valid.
    if (p.kept.defined()) {
      basis.mul_(at::where((basis * p.kept).sum(0) < 0, -1.0, 1.0).to(at::kFloat));
    }
    p.kept = basis.to(p.param.scalar_type());
    p.age = 0;
  } else if (!p.kept.defined()) {
    p.kept = random_basis(matrix.size(0), *o.rank, p.seed, grad.device()).to(p.param.scalar_type());
    p.age = o.update_proj_gap;
  } else {
    return;
  }
  p.seed = mix({p.seed});
}

Tensor galore_down(Projected& p, const Tensor& grad, const LowRankOptions& o) {
  if (!p.kept.defined() || p.age >= o.update_proj_gap) renew(p, grad, o);
  ++p.age;
  return project(grad, p.kept.to(at::kFloat), p.left);
}

void galore_up(Projected& p, const Tensor&, const LowRankOptions& o, const BaseOptions& base) {
  const Tensor basis = p.kept.to(at::kFloat), low = p.low.detach();
  change_rows(p.param, base.kept_weight(), [&](int64_t first, int64_t count, const Tensor& rows) {
    if (p.left) {
      rows.addmm_(basis.narrow(0, first, count), low, 1, o.scale);
    } else {
      rows.addmm_(low.narrow(0, first, count), basis.mT(), 1, o.scale);
    }
  });
}

}  // namespace

const Method& galore() {
  static const Method method{"GaLore",      "projection", "projection", false, {"auto", "left", "right"},
                             projection_as, galore_down,  galore_up};
  return method;
}

}  // namespace shoestring::optim::detail
