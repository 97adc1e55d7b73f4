// Checks the arguments of cross_entropy and linear_cross_entropy, and reduces the tokens' losses to a result.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/autograd.h"
#include "core/tensors.h"
#include "losses/cross_entropy.h"
#include "losses/head.h"

namespace shoestring::losses {
namespace {

// Converts t to `dtype`. If t already has this dtype, to() is not called: below autograd, an operator must
// not return its own argument, as to() would.
Tensor as(const Tensor& t, at::ScalarType dtype) { return t.scalar_type() == dtype ? t : t.to(dtype); }

void check_token_factor(const char* op, const char* name, const OptionalTensor& factor,
                        const Tensor& target) {
  TORCH_CHECK(!factor || factor->dim() == 0 || factor->sym_sizes() == target.sym_sizes(), op, ": ", name,
              ": expected shape () or ", target.sym_sizes(), ", received ", factor->sym_sizes());
}

}  // namespace

void check_number(const char* op, const char* name, const char* expected, double x, bool holds) {
  TORCH_CHECK(std::isfinite(x) && holds, op, ": ", name, ": expected ", expected, ", received ", x);
}

void check_tokens(const char* op, const char* name, const char* last, const Tensor& input,
                  const Tensor& target) {
  TORCH_CHECK(input.dim() >= 1, op, ": ", name, ": expected shape (..., ", last, "), received a scalar");
  const auto tokens = input.sym_sizes().slice(0, input.dim() - 1);
  TORCH_CHECK(target.sym_sizes() == tokens, op, ": target: expected ", name,
              "'s shape without its last dimension, ", tokens, ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, op, ": target: expected int64, received ",
              target.scalar_type(), "; call target.long()");
  TORCH_CHECK(is_supported_float(input.scalar_type()), op, ": ", name,
              ": expected fp32, fp64, bf16 or fp16, received ", input.scalar_type());
}

void check_weights(const char* op, const char* name, const OptionalTensor& weights, c10::SymIntArrayRef shape,
                   const Tensor& input) {
  if (!weights) return;
  TORCH_CHECK(weights->sym_sizes() == shape && is_supported_float(weights->scalar_type()) &&
                  weights->device() == input.device(),
              op, ": ", name, ": expected a floating tensor of shape ", shape, " on ", input.device(),
              ", received ", weights->scalar_type(), " ", weights->sym_sizes(), " on ", weights->device());
}

RowsProblem::RowsProblem(const char* op, const RowsCall& call, c10::SymInt vocab)
    : op(op), target(call.target), class_weights(call.options.class_weights()), grad_loss(call.grad_loss),
      grad_lse(call.grad_lse), grad_entropy(call.grad_entropy), ignore_index(call.options.ignore_index()),
      stats(call.stats), classes(std::move(vocab)) {
  const LinearCrossEntropyOptions& o = call.options;
  label_smoothing = o.label_smoothing();
  softcap = o.softcap();
  logit_scale = o.logit_scale();
  z_loss = o.z_loss();
  check_number(op, "label_smoothing", "a number in [0, 1)", label_smoothing,
               label_smoothing >= 0 && label_smoothing < 1);
  check_number(op, "softcap", "0 (none) or a positive number", softcap, softcap >= 0);
  check_number(op, "logit_scale", "a number that is not 0", logit_scale, logit_scale != 0);
  check_number(op, "z_loss", "a number of at least 0", z_loss, z_loss >= 0);
  check_weights(op, "class_weights", class_weights, {this->classes}, call.input);
  check_token_factor(op, "grad_loss", grad_loss, target);
  check_token_factor(op, "grad_lse", grad_lse, target);
  check_token_factor(op, "grad_entropy", grad_entropy, target);
}

Tensor count_correct(const Tensor& argmax, const Tensor& target) {
  // ignore_index may be -1 as well
  if (!target.is_cpu() || !target.is_contiguous() || !argmax.is_contiguous() || is_traced(target))
    return argmax.eq(target).logical_and(argmax.ge(0)).sum();
  // On the CPU a loop takes less time than PyTorch's operators.
  const int64_t *found = argmax.const_data_ptr<int64_t>(), *classes = target.const_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t i = 0; i < target.numel(); ++i) count += found[i] == classes[i] && found[i] >= 0;
  return at::full({}, count, target.options());
}

void RowsResult::fill(const Tensor& like) {
  const auto options = like.options().dtype(compute_type(like));
  if (!entropy.defined()) entropy = at::empty({0}, options);
  if (!argmax.defined()) argmax = at::empty({0}, options.dtype(at::kLong));
}

void RowsResult::view(const Tensor& target, bool stats) {
  if (!stats) entropy = argmax = Tensor();
  if (target.dim() == 1) return;
  for (Tensor* t : {&loss, &lse, &entropy, &argmax}) {
    if (t->defined()) *t = t->view_symint(target.sym_sizes());
  }
}

void TokenCall::prepare(const char* op, const char* name, const char* last, c10::SymInt vocab,
                        bool with_stats) {
  stats = with_stats;
  classes = std::move(vocab);
  const std::string& reduction = options.reduction();
  const double hard_fraction = options.hard_fraction();
  check_tokens(op, name, last, input, target);
  check_weights(op, "class_weights", options.class_weights(), {classes}, input);
  check_weights(op, "token_weights", options.token_weights(), target.sym_sizes(), input);
  TORCH_CHECK(hard_fraction > 0 && hard_fraction <= 1, op,
              ": hard_fraction: expected a number in (0, 1], received ", hard_fraction);
  check_reduction(op, reduction);
  if (!options.shift()) return;
  TORCH_CHECK(target.dim() >= 1, op,
              ": shift: expected a sequence of tokens, received a single token without a sequence dimension");
  // Shifts the target by one token: each token predicts the next one, and the last token of a sequence is
  // ignored. Shifting the target instead of the input avoids a copy of the input.
  Tensor next = at::full_like(target, options.ignore_index(), at::MemoryFormat::Contiguous);
  const auto count = target.sym_size(-1);
  if (count > 1) next.slice_symint(-1, 0, count - 1).copy_(target.slice_symint(-1, 1));
  target = next;
}

// Keeps the tokens with the largest losses. The number of tokens that are not ignored is known on the device
// only. To avoid waiting for the device, the losses are sorted, and the smallest loss to keep is looked up on
// the device. All tokens whose loss equals the smallest one are kept, too.
void keep_largest(TokenCall& call, Tensor loss) {
  const c10::Scalar ignore_index = call.options.ignore_index();
  const Tensor ignored = call.ignored();
  if (call.options.token_weights()) loss = loss * *call.options.token_weights();
  loss = loss.masked_fill(ignored, -std::numeric_limits<double>::infinity());
  const Tensor sorted =
      std::get<0>(loss.reshape_symint({loss.sym_numel()}).sort(/*dim=*/0, /*descending=*/true));
  const Tensor kept =
      ignored.logical_not().sum(at::kDouble).mul(call.options.hard_fraction()).ceil().sub(1).clamp_min(0);
  const Tensor least = sorted.index_select(0, kept.to(at::kLong).reshape({1}));
  call.target = call.target.masked_fill(loss.ge(least.squeeze(0)).logical_not(), ignore_index);
}

namespace {

// Returns the number of tokens that are not ignored, as a tensor of shape (), fp64. On the CPU a loop over
// the targets takes less time than PyTorch's operators.
Tensor count_tokens(const TokenCall& call) {
  const Tensor& target = call.target;
  if (!target.is_cpu() || !target.is_contiguous() || is_traced(target))
    return call.counted().sum(at::kDouble);
  const int64_t* classes = target.const_data_ptr<int64_t>();
  const int64_t ignored = std::count(classes, classes + target.numel(), call.options.ignore_index());
  return at::full({}, static_cast<double>(target.numel() - ignored), target.options().dtype(at::kDouble));
}

}  // namespace

Reduction::Reduction(const TokenCall& call) : scalar(call.options.reduction() != "none"), copies(call.stats) {
  const LinearCrossEntropyOptions& o = call.options;
  const bool mean = o.reduction() == "mean";
  if (!o.token_weights() && (!mean || !o.class_weights())) {
    if (mean) total = count_tokens(call);
    return;
  }
  const Tensor counted = call.counted();
  if (o.token_weights())
    weights = as(*o.token_weights(), compute_type(call.input)).masked_fill(counted.logical_not(), 0);
  if (!mean) return;
  Tensor each = weights.defined() ? weights : counted;
  // out-of-range targets are only clamped here; _cross_entropy_rows and _linear_cross_entropy_rows report
  // them
  if (o.class_weights()) {
    const Tensor index = call.target.masked_fill(counted.logical_not(), 0).clamp_min(0);
    const Tensor within = at::minimum(index, at::scalar_tensor(call.classes - 1, index.options()));
    each = each * at::take(*o.class_weights(), within);
  }
  total = each.sum(at::kDouble);
  if (!o.class_weights() || o.z_loss() == 0) return;
  z_loss = o.z_loss();
  const Tensor tokens = (weights.defined() ? weights : counted).sum(at::kDouble), nothing = total.eq(0);
  share = (total / tokens).masked_fill(nothing, 1);
  total = tokens.masked_fill(nothing, std::numeric_limits<double>::quiet_NaN());
}

void Reduction::balance(TokenCall& call) const {
  if (!share.defined()) return;
  const auto compute = compute_type(call.input);
  call.options.class_weights(as(*call.options.class_weights(), compute) / share);
}

Tensor Reduction::balanced(const Tensor& loss, const Tensor& lse) const {
  if (!share.defined()) return loss;
  const Tensor z = z_loss * lse.square();
  return (loss - z) / share + z;
}

Tensor Reduction::original(const Tensor& loss, const Tensor& lse) const {
  if (!share.defined()) return loss;
  const Tensor z = z_loss * lse.square();
  return (loss - z) * share + z;
}

Tensor Reduction::apply(const Tensor& loss) const {
  Tensor weighted = weights.defined() ? loss * weights : copies && !scalar ? loss.clone() : loss;
  if (!scalar) return weighted;
  weighted = weighted.sum(at::kDouble);
  // A mean over no tokens divides 0 by 0, which gives NaN.
  return as(total.defined() ? weighted / total : weighted, loss.scalar_type());
}

Tensor Reduction::factor(at::ScalarType dtype) const {
  if (!total.defined()) return weights.defined() ? weights : Tensor();
  const Tensor share = total.reciprocal();
  if (!weights.defined()) return as(share, dtype);
  // if all token weights are 0, 1 / total is inf and 0 * inf would be NaN
  return as(weights * share, dtype).masked_fill(weights.eq(0), 0);
}

std::vector<Tensor> balanced_upstream(std::vector<Tensor> upstream, const Tensor& share, const Tensor& lse,
                                      double z_loss) {
  if (!share.defined() || upstream.size() < 3 || !upstream[1].defined()) return upstream;
  const Tensor by_lse = upstream[1] * lse * (2 * z_loss * (1 - share));
  upstream[2] = upstream[2].defined() ? upstream[2] + by_lse : by_lse;
  upstream[1] = upstream[1] * share;
  return upstream;
}

std::array<Tensor, 3> upstream_of_tokens(const std::vector<Tensor>& upstream, const Tensor& factor,
                                         at::ScalarType compute) {
  std::array<Tensor, 3> gradient;
  if (upstream[0].defined()) {
    const Tensor u = upstream[0].to(compute);
    gradient[0] = factor.defined() ? factor * u : u;
  }
  for (size_t i = 1; i < upstream.size() && i <= 3; ++i) {
    if (!upstream[i].defined()) continue;
    const Tensor u = upstream[i].to(compute);
    gradient[i - 1] = gradient[i - 1].defined() ? gradient[i - 1] + u : u;
  }
  return gradient;
}

}  // namespace shoestring::losses
