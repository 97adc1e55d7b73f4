#include "losses/cross_entropy_cuda.h"

#include <torch/library.h>

#include "core/cuda.h"
#include "losses/cross_entropy.h"

namespace shoestring::losses {
namespace {

RowsResult cross_entropy_rows_cuda(CrossEntropyProblem& p) {
  const c10::OptionalDeviceGuard guard(p.input.device());
  p.place();
  TORCH_CHECK(p.classes <= (int64_t{1} << 31) - 16, kCrossEntropyOp,
              ": logits: expected fewer than 2^31 - 16 classes on CUDA, received ", p.classes);
  const OptionalTensor& weights = p.options.class_weights();
  const RowsOnCuda tensors(p, weights ? weights->to(compute_type(p.input)).contiguous() : Tensor());
  RowsResult out = p.allocate(/*zeros=*/false);
  auto rows = tensors.launch(0, p.target.numel(), out);
  rows.logits = p.input.const_data_ptr();
  rows.logits_at = p.layout;
  // The logits are logit_scale times the raw logits, so the gradient with respect to the raw logits has the
  // factor logit_scale as well.
  rows.factor = rows.logit_scale;
  if (p.gradient.defined()) rows.gradient = p.gradient.mutable_data_ptr();
  rows.gradient_at = p.gradient_layout;
  const auto run = rows_of(cuda::table<kernels::CrossEntropyCuda>(kCrossEntropyOp), p.input.scalar_type());
  check_launch(kCrossEntropyOp, run(rows, stream_of(p.input)));
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { register_cross_entropy_rows<cross_entropy_rows_cuda>(m); }

}  // namespace
}  // namespace shoestring::losses
