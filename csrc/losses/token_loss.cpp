#include "losses/token_loss.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/autograd.h"
#include "core/tensors.h"
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

// Expects a floating tensor of the given shape, with one weight per class or token.
void check_weights(const TokenProblem& p, const char* name, const OptionalTensor& weights,
                   c10::SymIntArrayRef shape) {
  if (!weights) return;
  TORCH_CHECK(weights->sym_sizes() == shape && is_supported_float(weights->scalar_type()) &&
                  weights->device() == p.input.device(),
              p.op, ": ", name, ": expected a floating tensor of shape ", shape, " on ", p.input.device(),
              ", received ", weights->scalar_type(), " ", weights->sym_sizes(), " on ", weights->device());
}

}  // namespace

void check_number(const char* op, const char* name, const char* expected, double x, bool holds) {
  TORCH_CHECK(std::isfinite(x) && holds, op, ": ", name, ": expected ", expected, ", received ", x);
}

void TokenProblem::check_tokens() const {
  TORCH_CHECK(input.dim() >= 1, op, ": ", name, ": expected shape (..., ", last, "), received a scalar");
  const auto tokens = input.sym_sizes().slice(0, input.dim() - 1);
  TORCH_CHECK(target.sym_sizes() == tokens, op, ": target: expected ", name,
              "'s shape without its last dimension, ", tokens, ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, op, ": target: expected int64, received ",
              target.scalar_type(), "; call target.long()");
  TORCH_CHECK(is_supported_float(input.scalar_type()), op, ": ", name,
              ": expected fp32, fp64, bf16 or fp16, received ", input.scalar_type());
}

void Targets::check(const char* op) const {
  if (!target2 && !mix) return;
  TORCH_CHECK(mix, op, ": mix: expected the part of target, in [0, 1], with target2, received None");
  TORCH_CHECK(target2, op, ": target2: expected a tensor with mix, received None; leave mix out, or pass it");
  TORCH_CHECK(target2->sym_sizes() == target.sym_sizes() && target2->scalar_type() == at::kLong &&
                  target2->device() == target.device(),
              op, ": target2: expected int64 in the shape of target, ", target.sym_sizes(), ", on ",
              target.device(), ", received ", target2->scalar_type(), " ", target2->sym_sizes(), " on ",
              target2->device());
  const bool fits = mix->dim() == 0 || mix->sym_sizes() == target.sym_sizes() || mix->sym_numel() == 1;
  TORCH_CHECK(fits, op, ": mix: expected one number, or numbers in the shape of target, ", target.sym_sizes(),
              ", received ", mix->sym_sizes());
  TORCH_CHECK(mix->scalar_type() == at::kFloat || mix->scalar_type() == at::kDouble, op,
              ": mix: expected fp32 or fp64, received ", mix->scalar_type(), "; call mix.float()");
}

Tensor Targets::counted() const { return target2 ? parts().gt(0) : target.ne(ignore_index); }

template <class OfTarget>
Tensor Targets::sum(OfTarget of_target) const {
  const auto of = [&](const Tensor& classes, const Tensor& part) {
    return (as(of_target(classes), at::kDouble) * part).masked_fill(classes.eq(ignore_index), 0);
  };
  const Tensor part = as(*mix, at::kDouble);
  return of(target, part) + of(*target2, 1 - part);
}

Tensor Targets::parts() const {
  return sum([](const Tensor& classes) { return at::ones({}, classes.options().dtype(at::kDouble)); });
}

TargetsOnCpu::TargetsOnCpu(const Targets& targets)
    : target_(targets.target.contiguous()),
      target2_(targets.target2 ? targets.target2->contiguous() : target_),
      first_(target_.const_data_ptr<int64_t>()), second_(target2_.const_data_ptr<int64_t>()),
      ignore_index_(targets.ignore_index) {
  if (!targets.mix) return;
  values_ = as(*targets.mix, at::kDouble).contiguous();
  mix_ = values_.const_data_ptr<double>();
  stride_ = values_.dim() != 0;
}

void TokenProblem::set_upstream(const std::array<Tensor, 3>& gradients) {
  grad_loss = as_optional(gradients[0]);
  grad_lse = as_optional(gradients[1]);
  grad_entropy = as_optional(gradients[2]);
}

void TokenProblem::check_rows() const {
  each_number(options, [&](const char* name, double x, auto, const char* expected, bool holds) {
    check_number(op, name, expected, x, holds);
  });
  check_weights(*this, "class_weights", options.class_weights(), {classes});
  targets().check(op);
  check_token_factor(op, "mix", options.mix(), target);
  check_token_factor(op, "grad_loss", grad_loss, target);
  check_token_factor(op, "grad_lse", grad_lse, target);
  check_token_factor(op, "grad_entropy", grad_entropy, target);
}

kernels::CrossEntropyFormula TokenProblem::formula() const {
  kernels::CrossEntropyFormula formula;
  each_number(options, [&](const char*, double x, auto member, auto...) { formula.*member = x; });
  return formula;
}

RowsResult TokenProblem::allocate(bool zeros) const {
  const auto compute = input.options().dtype(compute_type(input));
  const auto each = [&] {
    return zeros ? at::zeros_symint(target.sym_sizes(), compute)
                 : at::empty_symint(target.sym_sizes(), compute);
  };
  RowsResult out{each(), each(), {}, {}};
  if (!stats) return out;
  out.entropy = each();
  out.argmax = at::empty_symint(target.sym_sizes(), compute.dtype(at::kLong));
  if (zeros) out.argmax.fill_(-1);
  return out;
}

std::vector<int64_t> TokenProblem::rows_that_count(const TargetsOnCpu& targets) const {
  const int64_t count = target.numel(), vocab = classes.expect_int(), ignored = options.ignore_index();
  auto rows = losses::rows_that_count(op, count, target, ignored, vocab);
  if (!options.target2()) return rows;
  losses::rows_that_count(op, count, *options.target2(), ignored, vocab, "target2");
  rows.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (targets[i].part != 0) rows.push_back(i);
  }
  return rows;
}

namespace {

// Returns the number of tokens whose most likely class is their target, as int64 of shape (). argmax is -1
// for ignored tokens.
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

}  // namespace

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

void TokenProblem::prepare() {
  const std::string& reduction = options.reduction();
  const double hard_fraction = options.hard_fraction();
  check_tokens();
  check_weights(*this, "class_weights", options.class_weights(), {classes});
  check_weights(*this, "token_weights", options.token_weights(), target.sym_sizes());
  TORCH_CHECK(hard_fraction > 0 && hard_fraction <= 1, op,
              ": hard_fraction: expected a number in (0, 1], received ", hard_fraction);
  check_reduction(op, reduction);
  targets().check(op);
  if (options.mix()) prepare_mix();
  if (!options.shift()) return;
  TORCH_CHECK(target.dim() >= 1, op,
              ": shift: expected a sequence of tokens, received a single token without a sequence dimension");
  // Shifts the target by one token: each token predicts the next one, and the last token of a sequence is
  // ignored. Shifting the target instead of the input avoids a copy of the input.
  const auto shifted = [&](const Tensor& classes) {
    Tensor next = at::full_like(classes, options.ignore_index(), at::MemoryFormat::Contiguous);
    const auto count = classes.sym_size(-1);
    if (count > 1) next.slice_symint(-1, 0, count - 1).copy_(classes.slice_symint(-1, 1));
    return next;
  };
  target = shifted(target);
  if (options.target2()) options.target2(shifted(*options.target2()));
}

void TokenProblem::prepare_mix() {
  Tensor mix = *options.mix();
  TORCH_CHECK(!needs_grad(mix), op,
              ": mix: expected a tensor that does not require a gradient; call mix.detach()");
  const bool one = mix.dim() == 0 || mix.sym_sizes() != target.sym_sizes();
  // On a GPU the kernel checks the numbers, because reading them here would wait for the GPU.
  const bool readable = mix.is_cpu() && !is_traced(mix);
  if (readable) {
    const Tensor values = as(mix, at::kDouble).contiguous();
    const double* x = values.const_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      TORCH_CHECK(x[i] >= 0 && x[i] <= 1, op, ": mix: expected numbers in [0, 1], received ", x[i],
                  " at position ", i);
    }
  }
  if (mix.dim() != 0 && one) mix = mix.reshape({});
  if (mix.device() != target.device()) {
    TORCH_CHECK(one && mix.is_cpu(), op, ": mix: expected numbers on the device of target, ", target.device(),
                ", received ", mix.device());
    // a fill on the device, because a copy from pageable memory would wait for it
    mix = readable ? at::full({}, mix.item<double>(), target.options().dtype(mix.scalar_type()))
                   : mix.to(target.device());
  }
  options.mix(mix);
}

// Keeps the tokens with the largest losses. The number of tokens that are not ignored is known on the device
// only. To avoid waiting for the device, the losses are sorted, and the smallest loss to keep is looked up on
// the device. All tokens whose loss equals the smallest one are kept, too.
void keep_largest(TokenProblem& p, Tensor loss) {
  const c10::Scalar ignore_index = p.options.ignore_index();
  const Tensor ignored = p.targets().ignored();
  if (p.options.token_weights()) loss = loss * *p.options.token_weights();
  loss = loss.masked_fill(ignored, -std::numeric_limits<double>::infinity());
  const Tensor sorted =
      std::get<0>(loss.reshape_symint({loss.sym_numel()}).sort(/*dim=*/0, /*descending=*/true));
  const Tensor kept =
      ignored.logical_not().sum(at::kDouble).mul(p.options.hard_fraction()).ceil().sub(1).clamp_min(0);
  const Tensor least = sorted.index_select(0, kept.to(at::kLong).reshape({1}));
  const Tensor dropped = loss.ge(least.squeeze(0)).logical_not();
  p.target = p.target.masked_fill(dropped, ignore_index);
  if (p.options.target2()) p.options.target2(p.options.target2()->masked_fill(dropped, ignore_index));
}

namespace {

// Returns the number of tokens that are not ignored, as a tensor of shape (), fp64. Of tokens with two
// targets it adds the parts. On the CPU a loop over the targets takes less time than PyTorch's operators.
Tensor count_tokens(const TokenProblem& p) {
  const Tensor& target = p.target;
  const Targets all = p.targets();
  if (!target.is_cpu() || !target.is_contiguous() || is_traced(target))
    return (all.target2 ? all.parts() : all.counted()).sum(at::kDouble);
  if (all.target2) {
    const TargetsOnCpu targets(all);
    double sum = 0;
    for (int64_t i = 0; i < target.numel(); ++i) sum += targets[i].part + targets[i].part2;
    return at::full({}, sum, target.options().dtype(at::kDouble));
  }
  const int64_t* classes = target.const_data_ptr<int64_t>();
  const int64_t ignored = std::count(classes, classes + target.numel(), p.options.ignore_index());
  return at::full({}, static_cast<double>(target.numel() - ignored), target.options().dtype(at::kDouble));
}

}  // namespace

Reduction::Reduction(const TokenProblem& p) : scalar(p.options.reduction() != "none"), copies(p.stats) {
  const LinearCrossEntropyOptions& o = p.options;
  const bool mean = o.reduction() == "mean";
  if (!o.token_weights() && (!mean || !o.class_weights())) {
    if (mean) total = count_tokens(p);
    return;
  }
  const Targets targets = p.targets();
  const Tensor counted = targets.counted();
  if (o.token_weights())
    weights = as(*o.token_weights(), compute_type(p.input)).masked_fill(counted.logical_not(), 0);
  if (!mean) return;
  // Returns x, which each token has, times the token weights, if there are any, in their dtype.
  const auto weighted = [&](const Tensor& x) {
    return weights.defined() ? weights * as(x, weights.scalar_type()) : x;
  };
  if (targets.target2) parts = targets.parts();
  const Tensor each = targets.target2 ? weighted(parts) : weights.defined() ? weights : counted;
  // out-of-range targets are only clamped here; _cross_entropy_rows and _linear_cross_entropy_rows report
  // them
  const auto weight_of = [&](const Tensor& classes) {
    const Tensor index = classes.clamp_min(0);
    const Tensor within = at::minimum(index, at::scalar_tensor(p.classes - 1, index.options()));
    return at::take(*o.class_weights(), within);
  };
  if (!o.class_weights()) {
    total = each.sum(at::kDouble);
  } else if (targets.target2) {
    total = weighted(targets.sum(weight_of)).sum(at::kDouble);
  } else {
    total = (each * weight_of(p.target.masked_fill(counted.logical_not(), 0))).sum(at::kDouble);
  }
  if (!o.class_weights() || o.z_loss() == 0) return;
  z_loss = o.z_loss();
  const Tensor tokens = each.sum(at::kDouble), nothing = total.eq(0);
  share = (total / tokens).masked_fill(nothing, 1);
  total = tokens.masked_fill(nothing, std::numeric_limits<double>::quiet_NaN());
}

void Reduction::balance(TokenProblem& p) const {
  p.options.token_weights(std::nullopt);
  if (share.defined()) p.options.class_weights(as(*p.options.class_weights(), compute_type(p.input)) / share);
}

Tensor Reduction::balanced(const Tensor& loss, const Tensor& lse) const {
  if (!share.defined()) return loss;
  const Tensor z = z_loss * (lse * slope_of_z(lse));
  return (loss - z) / share + z;
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

std::vector<Tensor> Reduction::results(const TokenProblem& p, const RowsResult& rows) const {
  const Tensor loss = apply(rows.loss);
  if (!p.stats) return {loss};
  Tensor each = rows.loss;  // with the caller's class weights
  if (share.defined()) {
    const Tensor z = z_loss * (rows.lse * slope_of_z(rows.lse));
    each = (each - z) * share + z;
  }
  return {loss, each, rows.lse, rows.entropy, rows.argmax, count_correct(rows.argmax, p.target)};
}

TokenUpstream Reduction::upstream(Tensor factor, const Tensor& lse) const {
  if (!share.defined() || !lse.defined()) return {std::move(factor), {}, {}, 0};
  return {std::move(factor), share, slope_of_z(lse), z_loss};
}

std::array<Tensor, 3> TokenUpstream::of_tokens(std::vector<Tensor> upstream, at::ScalarType compute) const {
  // The gradient of a token's loss with the caller's class weights becomes two gradients: of the loss with
  // the class weights divided by `share`, and of the lse.
  if (share.defined() && upstream[1].defined()) {
    const Tensor by_lse = upstream[1] * slope * (2 * z_loss * (1 - share));
    upstream[2] = upstream[2].defined() ? upstream[2] + by_lse : by_lse;
    upstream[1] = upstream[1] * share;
  }
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

// With such token weights, `apply` records a call without them and with reduction='none'. The operations on
// its results also need each token's lse if Reduction::share is defined, i.e. for a mean with class weights
// and z_loss.
std::vector<Tensor> TokenProblem::record(c10::function_ref<std::vector<Tensor>()> apply) {
  if (!options.token_weights() || !needs_grad(*options.token_weights())) return apply();
  const Reduction reduction(*this);
  options.token_weights(std::nullopt).reduction("none");
  const bool given = std::exchange(stats, stats || reduction.share.defined());
  std::vector<Tensor> results = apply();
  results[0] = reduction.apply(stats ? reduction.balanced(results[0], results[2]) : results[0]);
  if (!given) results.resize(1);
  return results;
}

}  // namespace shoestring::losses
