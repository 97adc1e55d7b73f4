#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/cuda.h"
#include "losses/linear_distillation.h"
#include "losses/logit_waves.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

// The arguments of one call of _linear_distillation_rows, with the tensors that its CUDA kernels need on the
// device.
struct DistillationOnCuda : DistillationProblem {
  explicit DistillationOnCuda(const DistillationProblem& problem)
      : DistillationProblem(problem), ignored(target ? target->eq(ignore_index).unsqueeze(1) : Tensor()),
        waves(kDistillationOp, *this, ignored, mask,
              {.logit_scale = 1 / temperature,
               .averaged = averaged,
               .workspace_mb = workspace_mb,
               .buffers = 2}),
        padded_bias(divided(bias)), padded_teacher_bias(divided(teacher.bias)) {
    if (target) target = target->contiguous();
    if (grad_loss) factors = grad_loss->to(compute_type(hidden)).contiguous();
  }

  Tensor ignored;
  LogitWaves waves;
  // Biases in the compute dtype (fp32 or fp64), padded with zeros and divided by the temperature. Undefined
  // without a bias.
  Tensor padded_bias, padded_teacher_bias;
  Tensor factors;  // upstream gradient of the loss in the compute dtype, or undefined

 private:
  Tensor divided(const OptionalTensor& t) const {
    const Tensor padded = waves.padded(t);
    return padded.defined() ? padded.div(temperature) : padded;
  }
};

// Launches the row kernel on the logits of student and teacher; their first row belongs to token number
// `begin`.
void start_distillation_rows(const DistillationOnCuda& p, const Tensor& student, const Tensor& teacher,
                             const Tensor& gradient, int64_t begin, const Tensor& loss) {
  kernels::DistillationRows rows{};
  rows.student = student.const_data_ptr();
  rows.teacher = teacher.const_data_ptr();
  rows.tokens = student.size(0);
  rows.vocab = p.waves.vocab();
  rows.stride = p.waves.stride();
  rows.target = p.target ? p.target->const_data_ptr<int64_t>() + begin : nullptr;
  rows.ignore_index = p.ignore_index;
  rows.student_bias = pointer_to(p.padded_bias);
  rows.teacher_bias = pointer_to(p.padded_teacher_bias);
  rows.divergence = p.divergence;
  rows.beta = p.beta;
  rows.grad_loss = factor_from(p.factors, begin, rows.grad_loss_stride);
  rows.factor = p.waves.factor();
  rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  rows.loss = loss.narrow(0, begin, student.size(0)).mutable_data_ptr();
  const auto run =
      rows_of(cuda::table<kernels::LinearDistillationCuda>(kDistillationOp), p.hidden.scalar_type());
  check_launch(kDistillationOp, run(rows, stream_of(p.hidden)));
}

DistillationResult distillation_rows_cuda(const DistillationProblem& problem) {
  const c10::OptionalDeviceGuard guard(problem.hidden.device());
  const DistillationOnCuda p(problem);
  const quantization::BaseWeight teacher_weight =
      p.teacher.base(Backend::kCuda, kDistillationOp, p.teacher.hidden.scalar_type());
  const Tensor teacher_logits = p.waves.buffer();
  DistillationResult out;
  out.loss = at::empty({p.waves.tokens()}, p.waves.compute());
  out.gradients = p.waves.run([&](const Tensor& student, const Tensor& gradient, int64_t begin) {
    const int64_t tokens = student.size(0);
    const Tensor teacher = teacher_logits.narrow(0, 0, tokens);
    p.waves.write_logits(teacher, p.waves.counted(p.teacher.hidden, begin, tokens), teacher_weight);
    start_distillation_rows(p, student, teacher, gradient, begin, out.loss);
  });
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_linear_distillation_rows",
         torch::CppFunction::makeFromBoxedFunction<&boxed_distillation_rows<distillation_rows_cuda>>());
}

}  // namespace
}  // namespace shoestring::losses
