// Tokens go in waves: two GEMMs write the logits of a wave in fp32, and the row kernel writes the gradient of
// the student's: a 16-bit one to a buffer for several waves, fp32 in place. Two more GEMMs read that, a chunk
// at a time. Nothing waits for the GPU: tokens that are ignored cost their share of the products (on the CPU
// they cost nothing).

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/base_weight.h"
#include "ops/cuda.h"
#include "ops/gemm.h"
#include "ops/linear_distillation.h"

namespace shoestring {
namespace {

using at::Tensor;
using distillation::kBias;
using distillation::kHidden;
using distillation::kOp;
using distillation::kWeight;
using distillation::OptionalTensor;
using distillation::Problem;
using distillation::Result;

// A call as the device has it.
struct Work : Problem {
  explicit Work(const Problem& problem)
      : Problem(problem), padded_bias(padded(bias)), padded_teacher_bias(padded(teacher_bias)) {
    TORCH_CHECK(vocab() <= (int64_t{1} << 31) - 16, kOp,
                ": weight: expected fewer than 2^31 - 16 classes on CUDA, received ", vocab());
    if (target) target = target->contiguous();
    if (grad_loss) factors = grad_loss->to(compute()).contiguous();
    // A power of two near a mean's 1 / count: in fp16 most of the logits' gradients would otherwise be
    // rounded to zero. Not below 2^-15, which keeps the largest, 1 / scale, finite in fp16.
    for (int64_t n = tokens(); averaged && n > 1 && scale > 0x1p-15; n /= 2) scale /= 2;
  }

  int64_t tokens() const { return hidden.size(0); }
  int64_t features() const { return hidden.size(1); }
  int64_t vocab() const { return weight.size(0); }
  // Of the rows of logits and of their gradient: each begins at a multiple of 16 bytes.
  int64_t stride() const { return std::max<int64_t>(8, (vocab() + 7) / 8 * 8); }
  at::ScalarType compute() const { return compute_type(hidden); }
  // The gradient of the logits is in a buffer of its own.
  bool narrow() const { return wants_gradient() && hidden.scalar_type() != compute(); }

  Tensor padded_bias,
      padded_teacher_bias;  // (stride), compute type, divided by the temperature, or undefined
  Tensor factors;           // grad_loss, compute type, or undefined
  double scale = 1;         // what the products multiply the logits' gradient by

 private:
  Tensor padded(const OptionalTensor& t) const {
    if (!t) return {};
    return at::constant_pad_nd(t->to(compute()).div(temperature), {0, stride() - vocab()}).contiguous();
  }
};

// How many tokens have logits at a time, and how many have a gradient of them: a wave, and a chunk of whole
// waves. Every chunk is a pass over the fp32 accumulator of the weight's gradient, so by default chunks are
// large: all tokens where their 16-bit gradient is no larger than that accumulator.
struct Plan {
  explicit Plan(const Work& p) {
    const int64_t logits = 2 * p.stride() * static_cast<int64_t>(at::elementSize(p.compute()));  // of both
    if (const int64_t bytes = p.workspace_mb << 20; bytes > 0) {
      wave = std::max<int64_t>(1, bytes / (p.narrow() ? 2 : 1) / logits);
      chunk = (bytes - wave * logits) / (logits / 4);
    } else {
      wave = std::max<int64_t>(p.narrow() ? 128 : 1024, (int64_t{256} << 20) / logits);
      chunk = p.tokens() <= 2 * p.features() ? p.tokens() : std::max<int64_t>(2048, p.features());
    }
    wave = std::max<int64_t>(1, std::min(wave, p.tokens()));
    chunk = p.narrow() ? std::max<int64_t>(1, chunk / wave) * wave : wave;
  }
  int64_t wave, chunk;
};

// Rows from `begin` on, as many as `student` has.
void start_rows(const Work& p, const Tensor& student, const Tensor& teacher, const Tensor& gradient,
                int64_t begin, const Tensor& loss) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
  const int64_t tokens = student.size(0);
  const bool each = p.factors.defined() && p.factors.dim() == 1;
  kernels::DistillationRows rows{};
  rows.student = student.const_data_ptr();
  rows.teacher = teacher.const_data_ptr();
  rows.tokens = tokens;
  rows.vocab = p.vocab();
  rows.stride = p.stride();
  rows.target = p.target ? p.target->const_data_ptr<int64_t>() + begin : nullptr;
  rows.ignore_index = p.ignore_index;
  rows.student_bias = pointer(p.padded_bias);
  rows.teacher_bias = pointer(p.padded_teacher_bias);
  rows.divergence = p.divergence;
  rows.beta = p.beta;
  rows.grad_loss = pointer(each ? p.factors.narrow(0, begin, tokens) : p.factors);
  rows.grad_loss_stride = each;
  rows.factor = 1 / p.scale;
  rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  rows.loss = loss.narrow(0, begin, tokens).mutable_data_ptr();
  const auto& kernels = cuda::table<kernels::LinearDistillationCuda>(kOp);
  const auto dtype = p.hidden.scalar_type();
  const auto run = dtype == at::kDouble     ? kernels.rows_double
                   : dtype == at::kFloat    ? kernels.rows_float
                   : dtype == at::kBFloat16 ? kernels.rows_bf16
                                            : kernels.rows_fp16;
  check_launch(kOp, run(rows, stream_of(p.hidden)));
}

Result rows(const Problem& problem) {
  const c10::OptionalDeviceGuard guard(problem.hidden.device());
  const Work p(problem);
  const Plan plan(p);
  const auto compute = p.hidden.options().dtype(p.compute());
  const bool gradient = p.wants_gradient();
  const double scale = p.scale / p.temperature;
  const Tensor student = at::empty({plan.wave, p.stride()}, compute), teacher = at::empty_like(student);
  const Tensor grad_logits =
      p.narrow() ? at::empty({std::min(plan.chunk, std::max<int64_t>(1, p.tokens())), p.stride()},
                             p.hidden.options())
      : gradient ? student
                 : Tensor();
  const Tensor ignored = p.target ? p.target->eq(p.ignore_index).unsqueeze(1) : Tensor();

  Result out;
  out.loss = at::empty({p.tokens()}, compute);
  auto& gradients = out.gradients;
  if (p.mask[kHidden]) gradients[kHidden] = at::empty(p.hidden.sizes(), p.hidden.options());
  // Several chunks are summed in fp32 and rounded once; a single one writes the result.
  if (p.mask[kWeight]) {
    gradients[kWeight] = at::empty(p.weight.sizes(), plan.chunk < p.tokens() ? compute : p.weight.options());
    if (p.tokens() == 0) gradients[kWeight].zero_();
  }
  if (p.mask[kBias]) gradients[kBias] = at::zeros({p.vocab()}, compute);

  for (int64_t begin = 0; begin < p.tokens(); begin += plan.chunk) {
    const int64_t tokens = std::min(plan.chunk, p.tokens() - begin);
    // What an ignored token holds must not show, and 0 * inf would.
    const auto counted = [&](const Tensor& t, int64_t first, int64_t count) {
      const Tensor part = t.narrow(0, first, count);
      return ignored.defined() ? part.masked_fill(ignored.narrow(0, first, count), 0) : part;
    };
    const Tensor x = counted(p.hidden, begin, tokens);
    for (int64_t first = 0; first < tokens; first += plan.wave) {
      const int64_t some = std::min(plan.wave, tokens - first);
      const Tensor z = student.narrow(0, 0, some), y = teacher.narrow(0, 0, some);
      gemm(z.narrow(1, 0, p.vocab()), x.narrow(0, first, some), p.weight.t(), /*beta=*/0, 1 / p.temperature);
      gemm(y.narrow(1, 0, p.vocab()), counted(p.teacher_hidden, begin + first, some), p.teacher_weight.t(),
           /*beta=*/0, 1 / p.temperature);
      start_rows(p, z, y, gradient ? grad_logits.narrow(0, first, some) : Tensor(), begin + first, out.loss);
    }
    if (!gradient) continue;
    const Tensor grad = grad_logits.narrow(0, 0, tokens).narrow(1, 0, p.vocab());
    if (p.mask[kHidden]) gemm(gradients[kHidden].narrow(0, begin, tokens), grad, p.weight, /*beta=*/0, scale);
    if (p.mask[kWeight]) gemm(gradients[kWeight], grad.t(), x, /*beta=*/begin == 0 ? 0 : 1, scale);
    if (p.mask[kBias]) gradients[kBias].add_(grad.sum(0, /*keepdim=*/false, p.compute()), scale);
  }
  for (int i : {kWeight, kBias}) {
    if (p.mask[i]) gradients[i] = gradients[i].to(p.hidden.scalar_type());
  }
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("linear_distillation_rows", torch::CppFunction::makeFromBoxedFunction<&distillation::boxed<rows>>());
}

}  // namespace
}  // namespace shoestring
