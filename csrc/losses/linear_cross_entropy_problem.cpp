// Checks the arguments of _linear_cross_entropy_rows.

#include "losses/linear_cross_entropy.h"

namespace shoestring::losses {

namespace {

void check_weight_grad(const LinearCrossEntropyProblem& p) {
  if (!p.weight_grad || p.absmax) return;
  TORCH_CHECK(p.weight_grad->sym_sizes() == p.weight.sym_sizes() &&
                  p.weight_grad->scalar_type() == compute_type(p.hidden) &&
                  p.weight_grad->device() == p.hidden.device(),
              kLinearCrossEntropyOp, ": weight_grad: expected ", compute_type(p.hidden),
              " of weight's shape, ", p.weight.sym_sizes(), ", on ", p.hidden.device(), ", received ",
              p.weight_grad->scalar_type(), " ", p.weight_grad->sym_sizes(), " on ", p.weight_grad->device());
}

}  // namespace

LinearCrossEntropyProblem::LinearCrossEntropyProblem(const BoxedArguments& a)
    : Head(a), RowsProblem(kLinearCrossEntropyOp, a, hidden, vocab), weight_grad(a.optional("weight_grad")),
      filter_eps(finite(kLinearCrossEntropyOp, a, "filter_eps", "a number in [0, 1)",
                        [](double x) { return x >= 0 && x < 1; })),
      averaged(a["averaged"].toBool()), workspace_mb(a["workspace_mb"].toInt()),
      mask(mask_of(a["output_mask"])) {
  check(kLinearCrossEntropyOp, /*wide=*/true);
  check_mask(kLinearCrossEntropyOp, mask);
  check_target(kLinearCrossEntropyOp, *this, target);
  TORCH_CHECK(hidden.dim() == 2, kLinearCrossEntropyOp,
              "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  check_weight_grad(*this);
  TORCH_CHECK(filter_eps == 0 || !absmax, kLinearCrossEntropyOp,
              ": filter_eps: expected 0 with a quantised weight, received ", filter_eps);
  check_workspace(kLinearCrossEntropyOp, workspace_mb);
}

}  // namespace shoestring::losses
