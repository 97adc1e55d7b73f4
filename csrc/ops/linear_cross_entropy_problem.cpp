// What linear_cross_entropy_rows may be called with.

#include <cmath>

#include "ops/linear_cross_entropy.h"

namespace shoestring::cross_entropy {

// A tensor for each class or token: any floating type, or that of the call's loss.
void check_weights(const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape, const Tensor& hidden) {
  if (!weights) return;
  TORCH_CHECK(weights->sym_sizes() == shape && at::isFloatingType(weights->scalar_type()) &&
                  weights->device() == hidden.device(),
              kOp, ": ", name, ": expected a floating tensor of shape ", shape, " on ", hidden.device(), ", received ",
              weights->scalar_type(), " ", weights->sym_sizes(), " on ", weights->device());
}

namespace {

void check_weight_grad(const Problem& p) {
  if (!p.weight_grad || p.absmax) return;
  TORCH_CHECK(p.weight_grad->sym_sizes() == p.weight.sym_sizes() &&
                  p.weight_grad->scalar_type() == compute_type(p.hidden) && p.weight_grad->device() == p.hidden.device(),
              kOp, ": weight_grad: expected ", compute_type(p.hidden), " of weight's shape, ", p.weight.sym_sizes(),
              ", on ", p.hidden.device(), ", received ", p.weight_grad->scalar_type(), " ", p.weight_grad->sym_sizes(),
              " on ", p.weight_grad->device());
}

double finite(const BoxedArguments& arguments, const char* name, const char* expected, bool (*holds)(double)) {
  const double x = arguments.number(name);
  TORCH_CHECK(std::isfinite(x) && holds(x), kOp, ": ", name, ": expected ", expected, ", received ", x);
  return x;
}

}  // namespace

Problem::Problem(const BoxedArguments& a)
    : Head(a),
      target(a.tensor("target")),
      class_weights(a.optional("class_weights")),
      weight_grad(a.optional("weight_grad")),
      grad_loss(a.optional("grad_loss")),
      grad_lse(a.optional("grad_lse")),
      grad_entropy(a.optional("grad_entropy")),
      ignore_index(a["ignore_index"].toInt()),
      label_smoothing(finite(a, "label_smoothing", "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; })),
      softcap(finite(a, "softcap", "0 (none) or a positive number", [](double x) { return x >= 0; })),
      logit_scale(finite(a, "logit_scale", "a number that is not 0", [](double x) { return x != 0; })),
      z_loss(finite(a, "z_loss", "a number of at least 0", [](double x) { return x >= 0; })),
      filter_eps(finite(a, "filter_eps", "a number in [0, 1)", [](double x) { return x >= 0 && x < 1; })),
      averaged(a["averaged"].toBool()),
      stats(a["stats"].toBool()),
      workspace_mb(a["workspace_mb"].toInt()),
      mask(head::mask_of(a["output_mask"])) {
  check(kOp);
  check_mask(kOp, mask);
  check_target(kOp, *this, target);
  TORCH_CHECK(hidden.dim() == 2, kOp, "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  check_weight_grad(*this);
  TORCH_CHECK(filter_eps == 0 || !absmax, kOp, ": filter_eps: expected 0 with a quantised weight, received ", filter_eps);
  check_weights("class_weights", class_weights, {vocab}, hidden);
  head::check_factor(kOp, "grad_loss", *this, grad_loss);
  head::check_factor(kOp, "grad_lse", *this, grad_lse);
  head::check_factor(kOp, "grad_entropy", *this, grad_entropy);
  head::check_workspace(kOp, workspace_mb);
}

}  // namespace shoestring::cross_entropy
