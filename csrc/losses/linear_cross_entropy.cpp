#include "losses/linear_cross_entropy.h"

#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/losses/ops.h>

#include "core/autograd.h"
#include "core/device.h"
#include "core/row_source.h"
#include "core/tensors.h"
#include "losses/head_autograd.h"

namespace shoestring::losses {

LinearCrossEntropyProblem::LinearCrossEntropyProblem(const Tensor& hidden, const Tensor& weight,
                                                     const Tensor& target, const OptionalTensor& bias,
                                                     const LinearCrossEntropyOptions& given)
    : LinearCrossEntropyProblem() {
  input = hidden;
  this->weight = weight;
  this->target = target;
  this->bias = bias;
  options = given;
}

void LinearCrossEntropyRowsArguments::check() {
  const Head head(*this);
  classes = head.vocab;
  const double filter_eps = options.filter_eps();
  check_rows();
  check_number(kOp, "filter_eps", "a number in [0, 1)", filter_eps, filter_eps >= 0 && filter_eps < 1);
  head.check(kOp, /*wide=*/true);
  head.check_mask(kOp, mask);
  check_target(kOp, head, target);
  TORCH_CHECK(input.dim() == 2, kOp, "_rows: hidden: expected shape (tokens, features), received ",
              input.sym_sizes());
  if (const auto& sum = options.weight_grad(); sum && !options.absmax()) {
    TORCH_CHECK(sum->sym_sizes() == weight.sym_sizes() && sum->scalar_type() == compute_type(input) &&
                    sum->device() == input.device(),
                kOp, ": weight_grad: expected ", compute_type(input), " of weight's shape, ",
                weight.sym_sizes(), ", on ", input.device(), ", received ", sum->scalar_type(), " ",
                sum->sym_sizes(), " on ", sum->device());
  }
  TORCH_CHECK(filter_eps == 0 || !options.absmax(), kOp,
              ": filter_eps: expected 0 with a quantised weight, received ", filter_eps);
  check_workspace(kOp, options.workspace_mb());
  if (row_source_of(weight) == nullptr) return;
  TORCH_CHECK(!mask[kWeight], kOp, ": weight: expected a frozen weight, or one on ", input.device(),
              ", received one that is away and requires a gradient");
  options.filter_eps(0);  // the filter would gather rows of classes from all over the weight
}

LinearCrossEntropyProblem LinearCrossEntropyProblem::read(const c10::OperatorHandle& op,
                                                          const torch::jit::Stack& stack) {
  auto p = read_fields<LinearCrossEntropyProblem>(stack);
  const Head head(p);
  p.classes = head.vocab;
  p.stats = op.schema().returns().size() > 1;
  p.prepare();
  head.check(kOp, /*wide=*/true);
  const auto& upstream_grad = p.upstream_grad();
  TORCH_CHECK(
      !upstream_grad || (p.weight_grad() && std::isfinite(*upstream_grad) && *upstream_grad != 0), kOp,
      ": upstream_grad: expected None, or a finite number that is not 0 together with weight_grad, received ",
      *upstream_grad);
  TORCH_CHECK(
      !upstream_grad || p.options.reduction() != "none", kOp,
      ": upstream_grad: expected None with reduction='none', whose upstream gradients are not one number");
  return p;
}

LinearCrossEntropyResult LinearCrossEntropyProblem::rows(const std::array<Tensor, 3>& upstream,
                                                         const Mask& mask) const {
  LinearCrossEntropyRowsArguments flattened{*this};
  LinearCrossEntropyOptions& o = flattened.options;
  flattened.input = flat_rows(input);
  flattened.target = flat(input, target);
  o.lora_hidden(flat_rows(o.lora_hidden()));
  if (o.target2()) o.target2(flat(input, *o.target2())).mix(flat(input, *o.mix()));
  flattened.set_upstream({flat(input, upstream[0]), flat(input, upstream[1]), flat(input, upstream[2])});
  flattened.averaged = o.reduction() == "mean";
  flattened.mask = mask;
  static const Operator<LinearCrossEntropyRowsArguments, LinearCrossEntropyResult> op(
      "shoestring::_linear_cross_entropy_rows");
  LinearCrossEntropyResult r = op(flattened);
  r.view(target, stats);
  Mask given = mask;
  given[kWeight] = mask[kWeight] && !weight_grad();
  view_gradients(r.gradients, given, input, options.lora_hidden());
  return r;
}

namespace {

LinearCrossEntropyResult linear_cross_entropy_rows_meta(const LinearCrossEntropyProblem& p) {
  Mask mask = p.mask;
  mask[kWeight] = mask[kWeight] && !p.weight_grad();
  return {p.allocate(/*zeros=*/false), empty_gradients(inputs_of(p), mask)};
}

// Serves every device.
void linear_cross_entropy_without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto p = LinearCrossEntropyProblem::read(op, *stack);
  replace_arguments<LinearCrossEntropyProblem>(stack, without_gradients(std::move(p)));
}

void linear_cross_entropy_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto p = LinearCrossEntropyProblem::read(op, *stack);
  const LinearCrossEntropyOptions& o = p.options;
  const bool adds = o.weight_grad() && at::GradMode::is_enabled();
  const bool weighted = o.token_weights() && needs_grad(*o.token_weights());
  const bool recorded = at::GradMode::is_enabled() && any(require_grad(inputs_of(p)));
  std::vector<Tensor> results;
  if (!weighted && !recorded && !adds) {
    at::AutoDispatchBelowADInplaceOrView below;
    // A call of the operator itself would appear in the graphs of torch.compile. Inductor of PyTorch 2.11
    // fails on operators that may change an argument and return a single tensor.
    results = without_gradients(std::move(p));
  } else {
    TORCH_CHECK(
        !adds || recorded || o.upstream_grad(), kLinearCrossEntropyOp,
        ": weight_grad: expected an input that requires a gradient, since backward adds to the buffer, "
        "received none; pass upstream_grad to add to it in forward");
    {
      at::AutoDispatchBelowADInplaceOrView below;
      keep_hardest(p);
    }
    TORCH_CHECK(!weighted || !o.upstream_grad(), kLinearCrossEntropyOp,
                ": upstream_grad: expected None with token_weights that require a gradient");
    results = p.record([&] { return HeadLoss<LinearCrossEntropyProblem>::record(p); });
  }
  replace_arguments<LinearCrossEntropyProblem>(stack, std::move(results));
}

// Under autocast, hidden, weight and bias are cast to the autocast dtype, as for a linear layer. The loss is
// fp32 with every autocast dtype. On the CPU, the operator itself rounds an fp32 weight, and returns its
// gradient in fp32. This saves a copy of the weight and one of its gradient.
template <c10::DeviceType device>
void linear_cross_entropy_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const Tensor& weight = (*stack)[first + *op.schema().argumentIndexWithName("weight")].toTensor();
  if (device == at::kCPU && weight.scalar_type() == at::kFloat) {
    call_autocast(op, stack, device, {"hidden", "bias"});
  } else {
    call_autocast(op, stack, device, {"hidden", "weight", "bias"});
  }
}

constexpr const char* kLinearCrossEntropyOps[] = {"linear_cross_entropy", "linear_cross_entropy_with_stats"};

TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_rows<LinearCrossEntropyRowsArguments, linear_cross_entropy_rows_meta>>());
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  for (const char* name : kLinearCrossEntropyOps)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_without_gradients>());
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {
  for (const char* name : kLinearCrossEntropyOps)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autograd>());
}
const AutocastRules linear_cross_entropy_rules([](torch::Library& m, auto device) {
  for (const char* name : kLinearCrossEntropyOps)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&linear_cross_entropy_autocast<device>>());
});

}  // namespace
}  // namespace shoestring::losses

namespace shoestring {

using at::Tensor;

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const std::optional<Tensor>& bias, const LinearCrossEntropyOptions& options) {
  static const Operator<losses::LinearCrossEntropyProblem, TensorResult> op(
      "shoestring::linear_cross_entropy");
  return op({hidden, weight, target, bias, options}).tensor;
}

LinearCrossEntropyStats linear_cross_entropy_with_stats(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& target,
                                                        const std::optional<Tensor>& bias,
                                                        const LinearCrossEntropyOptions& options) {
  static const Operator<losses::LinearCrossEntropyProblem, losses::StatsResult> op(
      "shoestring::linear_cross_entropy_with_stats");
  return op({hidden, weight, target, bias, options});
}

}  // namespace shoestring
