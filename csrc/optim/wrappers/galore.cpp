#include <cmath>
#include <optional>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/split/all_reduce.h"
#include "optim/split/owners.h"
#include "optim/wrappers/low_rank_step.h"
#include "optim/wrappers/subspace.h"

namespace shoestring::optim::detail {
namespace {

int64_t basis_rows(const Projected& p) { return p.left ? p.rows : p.columns; }

std::pair<at::ScalarType, std::vector<int64_t>> projection_as(const Projected& p, const LowRankOptions& o) {
  return {p.param.scalar_type(), {basis_rows(p), *o.rank}};
}

// Returns a new projection in fp32, or nothing if the gradient (rows, columns) is zero or not finite.
std::optional<Tensor> new_basis(const Projected& p, const Tensor& grad, const LowRankOptions& o) {
  const double largest = at::linalg_vector_norm(grad, INFINITY).item<double>();
  if (!(largest > 0) || !std::isfinite(largest)) return std::nullopt;
  Tensor basis = leading_vectors((p.left ? grad : grad.mT()).to(at::kFloat), *o.rank, p.seed);
  // The sign of a singular vector is arbitrary. Here it follows the old projection, so that the first
  // moments, computed with the old projection, stay valid.
  if (p.kept.defined()) basis.mul_(at::where((basis * p.kept).sum(0) < 0, -1.0, 1.0).to(at::kFloat));
  return basis;
}

// Keeps a new projection. Without one, keeps the old projection (or starts with a random one), and tries
// again in the next step.
void keep(Projected& p, const std::optional<Tensor>& basis, const LowRankOptions& o) {
  if (basis) {
    p.kept = basis->to(p.param.scalar_type());
    p.age = 0;
  } else if (!p.kept.defined()) {
    p.kept = random_basis(basis_rows(p), *o.rank, p.seed, p.param.device()).to(p.param.scalar_type());
    p.age = o.update_proj_gap;
  } else {
    return;
  }
  p.seed = mix({p.seed});
}

// Computes the projections of split parameters, each on one rank that gets the whole gradient.
void renew_split(const std::vector<Renewed>& all, const SplitParameter& split) {
  std::vector<SplitMatrix> grads;
  std::vector<Partial> projections;  // 1 and the projection if there is one; zeros on all ranks but the owner
  for (const auto& [p, options] : all) {
    const Tensor grad = p->param.grad().to(at::kFloat);
    grads.push_back({grad, p->split(), matrix_cost({p->rows, p->columns})});
    projections.push_back({.sums = {at::zeros({1 + basis_rows(*p) * *options->rank}, grad.options())}});
  }
  on_owners(grads, std::nullopt, 0, [&](size_t i, const Tensor& whole) {
    const auto& [p, options] = all[i];
    if (const auto basis = new_basis(*p, whole.view({p->rows, p->columns}), *options)) {
      projections[i].sums[0].narrow(0, 0, 1).fill_(1);
      projections[i].sums[0].narrow(0, 1, basis->numel()).copy_(basis->reshape({-1}));
    }
    return Tensor();
  });
  combine(projections, split);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [p, options] = all[i];
    const Tensor &sum = projections[i].sums[0], basis = sum.narrow(0, 1, sum.numel() - 1);
    const bool has_one = sum.narrow(0, 0, 1).item<float>() > 0;
    keep(*p, has_one ? std::optional(basis.view({-1, *options->rank}).clone()) : std::nullopt, *options);
  }
}

void galore_renew(const std::vector<Renewed>& all) {
  ByGroups<Renewed> split;
  for (const auto& [p, options] : all) {
    if (const SplitParameter* of = p->split()) {
      split.add(*of, {p, options});
    } else {
      keep(*p, new_basis(*p, p->param.grad().flatten(1), *options), *options);
    }
  }
  for (const auto& [of, some] : split) renew_split(some, *of);
}

Tensor galore_basis(const Projected& p, const LowRankOptions&) { return p.kept.to(at::kFloat); }

void galore_up(const Projected& p, const Tensor&, const LowRankOptions& o, const BaseOptions& base) {
  const Tensor basis = p.kept.to(at::kFloat), low = p.low.detach();
  for (const auto& [box, weights] : p.boxes(p.param)) {
    const auto& [from, column, columns] = std::tie(box.row, box.column, box.columns);
    change_rows(weights, base.kept_weight(), [&](int64_t first, int64_t count, const Tensor& rows) {
      if (p.left) {
        rows.addmm_(basis.narrow(0, from + first, count), low.narrow(1, column, columns), 1, o.scale);
      } else {
        rows.addmm_(low.narrow(0, from + first, count), basis.narrow(0, column, columns).mT(), 1, o.scale);
      }
    });
  }
}

}  // namespace

const Method& galore() {
  static const Method method{.name = "GaLore",
                             .kind = "projection",
                             .kept = "projection",
                             .unit_lr = false,
                             .kinds = {"auto", "left", "right"},
                             .needs_lengths = false,
                             .kept_as = projection_as,
                             .renew = galore_renew,
                             .basis = galore_basis,
                             .up = galore_up};
  return method;
}

}  // namespace shoestring::optim::detail
