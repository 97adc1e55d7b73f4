#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "losses/cross_entropy_cuda.h"
#include "losses/linear_cross_entropy.h"
#include "losses/linear_cross_entropy_table.h"
#include "losses/logit_waves.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

// The arguments of one call of _linear_cross_entropy_rows, with the tensors that its CUDA kernels need on the
// device.
struct LinearCrossEntropyOnCuda : LinearCrossEntropyProblem {
  explicit LinearCrossEntropyOnCuda(const LinearCrossEntropyProblem& problem);
  // A copy would be wrong, because the member `waves` keeps a reference to this object.
  LinearCrossEntropyOnCuda(const LinearCrossEntropyOnCuda&) = delete;

  LogitWaves waves;
  // Bias, class weights and sum of the class weights: shapes (stride), (stride) and (), where stride is the
  // padded number of classes. They are in the compute dtype (fp32 or fp64), or undefined.
  Tensor padded_bias, padded_weights, total_weight;
  SecondTargets second;
  // upstream gradients of loss, lse and entropy in the compute dtype, or undefined
  std::array<Tensor, 3> factors;
};

LinearCrossEntropyOnCuda::LinearCrossEntropyOnCuda(const LinearCrossEntropyProblem& problem)
    : LinearCrossEntropyProblem(problem),
      waves(kLinearCrossEntropyOp, *this, targets().ignored().unsqueeze(1), mask,
            {.logit_scale = logit_scale,
             .averaged = averaged,
             .workspace_mb = workspace_mb,
             .weight_grad = weight_grad,
             .filter = filter_eps > 0}),
      second(problem, compute_type(hidden)) {
  target = target.contiguous();
  padded_bias = waves.padded(bias);
  if (padded_bias.defined() && logit_scale != 1) padded_bias.mul_(logit_scale);
  padded_weights = waves.padded(class_weights);
  if (padded_weights.defined())
    total_weight = padded_weights.sum(at::kDouble).to(padded_weights.scalar_type());
  factors = factors_of(*this, compute_type(hidden));
}

// Launches the row kernel on `logits`, whose first row belongs to token number `begin`.
void start_linear_cross_entropy_rows(const LinearCrossEntropyOnCuda& p, const Tensor& logits,
                                     const Tensor& gradient, int64_t begin,
                                     const LinearCrossEntropyResult& out) {
  const auto output = [&](const Tensor& t) {
    return t.defined() ? t.narrow(0, begin, logits.size(0)).mutable_data_ptr() : nullptr;
  };
  auto rows = launch_of(p, {}, p.padded_weights, p.total_weight);
  rows.logits = logits.const_data_ptr();
  rows.tokens = logits.size(0);
  rows.logits_at = rows.gradient_at = {rows.tokens, 0, p.waves.stride()};
  rows.target = p.target.const_data_ptr<int64_t>() + begin;
  p.second.add_to(rows, begin);
  rows.bias = pointer_to(p.padded_bias);
  rows.grad_loss = factor_from(p.factors[0], begin, rows.grad_loss_stride);
  rows.grad_lse = factor_from(p.factors[1], begin, rows.grad_lse_stride);
  rows.grad_entropy = factor_from(p.factors[2], begin, rows.grad_entropy_stride);
  rows.factor = p.waves.factor();
  rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  rows.live = static_cast<unsigned*>(p.waves.live().defined() ? p.waves.live().mutable_data_ptr() : nullptr);
  rows.filter_eps = p.filter_eps;
  rows.loss = output(out.loss);
  rows.lse = output(out.lse);
  rows.entropy = output(out.entropy);
  rows.argmax = static_cast<int64_t*>(output(out.argmax));
  const auto run =
      rows_of(cuda::table<kernels::LinearCrossEntropyCuda>(kLinearCrossEntropyOp), p.hidden.scalar_type());
  check_launch(kLinearCrossEntropyOp, run(rows, stream_of(p.hidden)));
}

LinearCrossEntropyResult linear_cross_entropy_rows_cuda(const LinearCrossEntropyProblem& problem) {
  const c10::OptionalDeviceGuard guard(problem.hidden.device());
  const LinearCrossEntropyOnCuda p(problem);
  const auto each = [&](at::TensorOptions options) { return at::empty({p.waves.tokens()}, options); };
  LinearCrossEntropyResult out;
  out.loss = each(p.waves.compute());
  out.lse = each(p.waves.compute());
  if (p.stats) {
    out.entropy = each(p.waves.compute());
    out.argmax = each(p.waves.compute().dtype(at::kLong));
  }
  out.gradients = p.waves.run([&](const Tensor& logits, const Tensor& gradient, int64_t begin) {
    start_linear_cross_entropy_rows(p, logits, gradient, begin, out);
  });
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_linear_cross_entropy_rows<linear_cross_entropy_rows_cuda>>());
}

}  // namespace
}  // namespace shoestring::losses
