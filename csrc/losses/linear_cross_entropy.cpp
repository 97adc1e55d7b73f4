#include "losses/linear_cross_entropy.h"

#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "core/autograd.h"
#include "core/row_source.h"
#include "core/tensors.h"

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

LinearCrossEntropyProblem::LinearCrossEntropyProblem(const LinearCrossEntropyRowsCall& call)
    : Head(call.input, call.weight, call.bias, call.options), RowsProblem(kLinearCrossEntropyOp, call, vocab),
      weight_grad(call.options.weight_grad()), filter_eps(call.options.filter_eps()), averaged(call.averaged),
      workspace_mb(call.options.workspace_mb()), mask(call.mask) {
  check_number(kLinearCrossEntropyOp, "filter_eps", "a number in [0, 1)", filter_eps,
               filter_eps >= 0 && filter_eps < 1);
  check(kLinearCrossEntropyOp, /*wide=*/true);
  check_mask(kLinearCrossEntropyOp, mask);
  check_target(kLinearCrossEntropyOp, *this, target);
  TORCH_CHECK(hidden.dim() == 2, kLinearCrossEntropyOp,
              "_rows: hidden: expected shape (tokens, features), received ", hidden.sym_sizes());
  check_weight_grad(*this);
  TORCH_CHECK(filter_eps == 0 || !absmax, kLinearCrossEntropyOp,
              ": filter_eps: expected 0 with a quantised weight, received ", filter_eps);
  check_workspace(kLinearCrossEntropyOp, workspace_mb);
  if (row_source_of(weight) == nullptr) return;
  TORCH_CHECK(!mask[kWeight], kLinearCrossEntropyOp, ": weight: expected a frozen weight, or one on ",
              hidden.device(), ", received one that is away and requires a gradient");
  filter_eps = 0;  // the filter would gather rows of classes from all over the weight
}

void run_linear_cross_entropy_rows(torch::jit::Stack* stack, LinearCrossEntropyRun run) {
  const LinearCrossEntropyProblem problem(read_fields<LinearCrossEntropyRowsCall>(*stack));
  LinearCrossEntropyResult r = run(problem);
  r.fill(problem.hidden);
  fill_gradients(r.gradients, problem.hidden);
  torch::jit::drop(*stack, count_of<LinearCrossEntropyRowsCall>());
  push_fields(*stack, r);
}

LinearCrossEntropyCall LinearCrossEntropyCall::read(const torch::jit::Stack& stack, bool stats) {
  auto call = read_fields<LinearCrossEntropyCall>(stack);
  const LinearCrossEntropyOptions& o = call.options;
  const Head head = call.head();
  call.prepare(kLinearCrossEntropyOp, "hidden", "features", head.vocab, stats);
  head.check(kLinearCrossEntropyOp, /*wide=*/true);
  const auto& upstream_grad = o.upstream_grad();
  TORCH_CHECK(
      !upstream_grad || (o.weight_grad() && std::isfinite(*upstream_grad) && *upstream_grad != 0),
      kLinearCrossEntropyOp,
      ": upstream_grad: expected None, or a finite number that is not 0 together with weight_grad, received ",
      *upstream_grad);
  TORCH_CHECK(
      !upstream_grad || o.reduction() != "none", kLinearCrossEntropyOp,
      ": upstream_grad: expected None with reduction='none', whose upstream gradients are not one number");
  return call;
}

LinearCrossEntropyResult linear_cross_entropy_rows(const LinearCrossEntropyCall& call,
                                                   const std::array<Tensor, 3>& upstream, const Mask& mask) {
  LinearCrossEntropyRowsCall rows;
  rows.input = flat_rows(call.input);
  rows.weight = call.weight;
  rows.target = flat(call.input, call.target);
  rows.bias = call.bias;
  rows.options = call.options;
  rows.options.lora_hidden(flat_rows(call.options.lora_hidden()));
  if (call.options.target2()) {
    rows.options.target2(flat(call.input, *call.options.target2()));
    rows.options.mix(flat(call.input, *call.options.mix()));
  }
  rows.grad_loss = as_optional(flat(call.input, upstream[0]));
  rows.grad_lse = as_optional(flat(call.input, upstream[1]));
  rows.grad_entropy = as_optional(flat(call.input, upstream[2]));
  rows.averaged = call.options.reduction() == "mean";
  rows.stats = call.stats;
  rows.mask = mask;
  static const Operator<LinearCrossEntropyRowsCall, LinearCrossEntropyResult> op(
      "shoestring::_linear_cross_entropy_rows");
  LinearCrossEntropyResult r = op(rows);
  r.view(call.target, call.stats);
  Mask given = mask;
  given[kWeight] = mask[kWeight] && !call.options.weight_grad();
  view_gradients(r.gradients, given, call.input, call.options.lora_hidden());
  return r;
}

template <bool kStats>
void linear_cross_entropy_without_gradients(LinearCrossEntropyCall call, torch::jit::Stack* stack) {
  keep_hardest(call);
  const Reduction reduction(call);
  reduction.balance(call);
  const LinearCrossEntropyResult r = linear_cross_entropy_rows(call, {}, {});
  torch::jit::drop(*stack, count_of<LinearCrossEntropyCall>());
  torch::jit::push(*stack, reduction.apply(r.loss));
  if constexpr (kStats) {
    torch::jit::push(*stack, reduction.original(r.loss, r.lse), r.lse, r.entropy, r.argmax,
                     count_correct(r.argmax, call.target));
  }
}
template void linear_cross_entropy_without_gradients<false>(LinearCrossEntropyCall, torch::jit::Stack*);
template void linear_cross_entropy_without_gradients<true>(LinearCrossEntropyCall, torch::jit::Stack*);

namespace {

using at::Tensor;

LinearCrossEntropyResult linear_cross_entropy_rows_meta(const LinearCrossEntropyProblem& p) {
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const auto each = [&](at::TensorOptions options) {
    return at::empty_symint(p.target.sym_sizes(), options);
  };
  LinearCrossEntropyResult r{{each(compute), each(compute), p.stats ? each(compute) : Tensor(),
                              p.stats ? each(compute.dtype(at::kLong)) : Tensor()},
                             {}};
  const auto inputs = p.inputs();
  for (int i = 0; i < kInputs; ++i) {
    if (!p.mask[i] || (i == kWeight && p.weight_grad)) continue;
    r.gradients[i] = at::empty_symint(inputs[i]->sym_sizes(), inputs[i]->options());
  }
  return r;
}

template <bool kStats>
void boxed_linear_cross_entropy(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  linear_cross_entropy_without_gradients<kStats>(LinearCrossEntropyCall::read(*stack, kStats), stack);
}

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_linear_cross_entropy_rows<linear_cross_entropy_rows_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy",
         torch::CppFunction::makeFromBoxedFunction<&boxed_linear_cross_entropy<false>>());
  m.impl("linear_cross_entropy_with_stats",
         torch::CppFunction::makeFromBoxedFunction<&boxed_linear_cross_entropy<true>>());
}

LinearCrossEntropyCall linear_cross_entropy_call(const Tensor& hidden, const Tensor& weight,
                                                 const Tensor& target, const std::optional<Tensor>& bias,
                                                 const LinearCrossEntropyOptions& options) {
  LinearCrossEntropyCall call;
  call.input = hidden;
  call.weight = weight;
  call.target = target;
  call.bias = bias;
  call.options = options;
  return call;
}

}  // namespace

}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const std::optional<Tensor>& bias, const LinearCrossEntropyOptions& options) {
  static const Operator<losses::LinearCrossEntropyCall, TensorResult> op("shoestring::linear_cross_entropy");
  return op(losses::linear_cross_entropy_call(hidden, weight, target, bias, options)).tensor;
}

LinearCrossEntropyStats linear_cross_entropy_with_stats(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& target,
                                                        const std::optional<Tensor>& bias,
                                                        const LinearCrossEntropyOptions& options) {
  static const Operator<losses::LinearCrossEntropyCall, losses::StatsResult> op(
      "shoestring::linear_cross_entropy_with_stats");
  return op(losses::linear_cross_entropy_call(hidden, weight, target, bias, options));
}

}  // namespace shoestring
