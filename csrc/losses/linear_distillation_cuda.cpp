#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "core/tensors.h"
#include "losses/linear_distillation.h"
#include "losses/logit_waves.h"

namespace shoestring::losses {
namespace {

DistillationResult distillation_rows_cuda(const DistillationProblem& p) {
  const c10::OptionalDeviceGuard guard(p.input.device());
  const LinearDistillationOptions& o = p.options;
  const auto compute = compute_type(p.input);
  const Tensor ignored = o.target() ? o.target()->eq(o.ignore_index()).unsqueeze(1) : Tensor();
  const LogitWaves waves(kDistillationOp, Head(p), ignored, p.mask,
                         {.logit_scale = 1 / o.temperature(),
                          .averaged = p.averaged,
                          .workspace_mb = o.workspace_mb(),
                          .buffers = 2});
  // biases in the compute dtype (fp32 or fp64), padded with zeros and divided by the temperature
  const auto divided = [&](const OptionalTensor& t) {
    const Tensor padded = waves.padded(t);
    return padded.defined() ? padded.div(o.temperature()) : padded;
  };
  const Tensor bias = divided(p.bias), teacher_bias = divided(p.teacher_bias);
  const Tensor target = o.target() ? o.target()->contiguous() : Tensor();
  const Tensor factors = p.grad_loss ? p.grad_loss->to(compute).contiguous() : Tensor();
  const quantization::BaseWeight teacher_weight =
      p.teacher().base(Backend::kCuda, kDistillationOp, p.teacher_hidden.scalar_type());
  const Tensor teacher_logits = waves.buffer();
  const auto run =
      rows_of(cuda::table<kernels::LinearDistillationCuda>(kDistillationOp), p.input.scalar_type());
  DistillationResult out;
  out.loss = at::empty({waves.tokens()}, waves.compute());
  out.gradients = waves.run([&](const Tensor& student, const Tensor& gradient, int64_t begin) {
    const int64_t tokens = student.size(0);
    const Tensor teacher = teacher_logits.narrow(0, 0, tokens);
    waves.write_logits(teacher, waves.counted(p.teacher_hidden, begin, tokens), teacher_weight);
    kernels::DistillationRows rows{};
    rows.student = student.const_data_ptr();
    rows.teacher = teacher.const_data_ptr();
    rows.tokens = tokens;
    rows.vocab = waves.vocab();
    rows.stride = waves.stride();
    rows.target = static_cast<const int64_t*>(element_of(target, begin));
    rows.ignore_index = o.ignore_index();
    rows.student_bias = pointer_to(bias);
    rows.teacher_bias = pointer_to(teacher_bias);
    rows.divergence = p.divergence;
    rows.beta = o.beta();
    rows.grad_loss = factor_from(factors, begin, rows.grad_loss_stride);
    rows.factor = waves.factor();
    rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
    rows.loss = out.loss.narrow(0, begin, tokens).mutable_data_ptr();
    check_launch(kDistillationOp, run(rows, stream_of(p.input)));
  });
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_linear_distillation_rows", torch::CppFunction::makeFromBoxedFunction<
                                          &boxed_rows<DistillationRowsArguments, distillation_rows_cuda>>());
}

}  // namespace
}  // namespace shoestring::losses
