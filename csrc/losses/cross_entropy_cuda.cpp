#include "losses/cross_entropy_cuda.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/tensors.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

RowsResult cross_entropy_rows_cuda(const CrossEntropyProblem& p) {
  const c10::OptionalDeviceGuard guard(p.logits.device());
  const auto compute = p.logits.options().dtype(compute_type(p.logits));
  TORCH_CHECK(p.classes <= (int64_t{1} << 31) - 16, kCrossEntropyOp,
              ": logits: expected fewer than 2^31 - 16 classes on CUDA, received ", p.classes);
  const auto factors = factors_of(p, compute_type(p.logits));
  const Tensor target = p.target.contiguous();
  const SecondTargets second(p, compute_type(p.logits));
  const Tensor weights =
      p.class_weights ? p.class_weights->to(compute_type(p.logits)).contiguous() : Tensor();
  const Tensor total = weights.defined() ? weights.sum(at::kDouble).to(weights.scalar_type()) : Tensor();
  const auto each = [&](at::TensorOptions options) { return at::empty(p.target.sizes(), options); };
  RowsResult out{each(compute), each(compute), {}, {}};
  if (p.stats) {
    out.entropy = each(compute);
    out.argmax = each(compute.dtype(at::kLong));
  }
  const auto place = [](const LogitsLayout& l) {
    return kernels::CrossEntropyLayout{l.inner, l.outer_stride, l.inner_stride};
  };
  auto rows = launch_of(p, factors, weights, total);
  rows.tokens = target.numel();
  rows.target = target.const_data_ptr<int64_t>();
  second.add_to(rows, 0);
  rows.logits = p.logits.const_data_ptr();
  rows.logits_at = place(p.layout);
  // The logits are logit_scale times the raw logits, so the gradient with respect to the raw logits has the
  // factor logit_scale as well.
  rows.logit_scale = rows.factor = p.logit_scale;
  if (p.gradient.defined()) rows.gradient = p.gradient.mutable_data_ptr();
  rows.gradient_at = place(p.gradient_layout);
  rows.loss = out.loss.mutable_data_ptr();
  rows.lse = out.lse.mutable_data_ptr();
  if (p.stats) {
    rows.entropy = out.entropy.mutable_data_ptr();
    rows.argmax = out.argmax.mutable_data_ptr<int64_t>();
  }
  const auto& kernels = cuda::table<kernels::CrossEntropyCuda>(kCrossEntropyOp);
  const auto dtype = p.logits.scalar_type();
  const auto run = dtype == at::kDouble     ? kernels.rows_double
                   : dtype == at::kFloat    ? kernels.rows_float
                   : dtype == at::kBFloat16 ? kernels.rows_bf16
                                            : kernels.rows_fp16;
  check_launch(kCrossEntropyOp, run(rows, stream_of(p.logits)));
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<&boxed_cross_entropy_rows<cross_entropy_rows_cuda>>());
  m.impl("_cross_entropy_rows_", torch::CppFunction::makeFromBoxedFunction<
                                     &boxed_cross_entropy_rows_in_place<cross_entropy_rows_cuda>>());
}

}  // namespace
}  // namespace shoestring::losses
