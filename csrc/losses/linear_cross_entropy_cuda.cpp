#include <torch/library.h>

#include "core/cuda.h"
#include "losses/cross_entropy_cuda.h"
#include "losses/linear_cross_entropy.h"

namespace shoestring::losses {
namespace {

LinearCrossEntropyResult linear_cross_entropy_rows_cuda(const LinearCrossEntropyProblem& p) {
  const c10::OptionalDeviceGuard guard(p.input.device());
  const LinearCrossEntropyOptions& o = p.options;
  const LogitWaves waves(p.op, Head(p), p.targets().ignored().unsqueeze(1), p.mask,
                         {.logit_scale = o.logit_scale(),
                          .averaged = p.averaged,
                          .workspace_mb = o.workspace_mb(),
                          .weight_grad = o.weight_grad(),
                          .filter = o.filter_eps() > 0});
  // Bias and class weights in the compute dtype (fp32 or fp64), padded like a row of logits.
  Tensor bias = waves.padded(p.bias);
  if (bias.defined() && o.logit_scale() != 1) bias.mul_(o.logit_scale());
  const RowsOnCuda tensors(p, waves.padded(o.class_weights()));
  const auto run = rows_of(cuda::table<kernels::LinearCrossEntropyCuda>(p.op), p.input.scalar_type());
  LinearCrossEntropyResult out{p.allocate(/*zeros=*/false), {}};
  out.gradients = waves.run([&](const Tensor& logits, const Tensor& gradient, int64_t begin) {
    auto rows = tensors.launch(begin, logits.size(0), out);
    rows.logits = logits.const_data_ptr();
    rows.logits_at = rows.gradient_at = {rows.tokens, 0, waves.stride()};
    rows.logit_scale = 1;  // the matrix product has applied it
    rows.bias = pointer_to(bias);
    rows.factor = waves.factor();
    rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
    rows.live = static_cast<unsigned*>(waves.live().defined() ? waves.live().mutable_data_ptr() : nullptr);
    rows.filter_eps = o.filter_eps();
    check_launch(p.op, run(rows, stream_of(p.input)));
  });
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_rows<LinearCrossEntropyRowsArguments, linear_cross_entropy_rows_cuda>>());
}

}  // namespace
}  // namespace shoestring::losses
