// Tokens go in waves: a GEMM writes a wave's logits in fp32, and the row kernel turns them into their gradient: a
// 16-bit one goes to a buffer for several waves, fp32 in place. Two more GEMMs read that, a chunk at a time. Nothing waits for the GPU: how many tokens count is known on the device only, so tokens
// that are ignored cost their share of the products (on the CPU they cost nothing).

#include <algorithm>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "kernels/linear_cross_entropy.h"
#include "ops/base_weight.h"
#include "ops/cuda.h"
#include "ops/gemm.h"
#include "ops/linear_cross_entropy.h"

namespace shoestring {
namespace {

using at::Tensor;
using cross_entropy::kBias;
using cross_entropy::kHidden;
using cross_entropy::kLow;
using cross_entropy::kOp;
using cross_entropy::kUp;
using cross_entropy::kWeight;
using cross_entropy::OptionalTensor;
using cross_entropy::Problem;
using cross_entropy::Result;

// A call as the device has it.
struct Work : Problem {
  explicit Work(const Problem& problem);

  int64_t classes;
  BaseWeight base;  // in panels, where it is of 4 bits
  Tensor low_rows, up_rows;  // low and up in hidden's dtype, or undefined
  Tensor padded_bias, padded_weights, total_weight;  // (stride), (stride), (): compute type, or undefined
  Tensor factors[3];                                 // grad_loss, grad_lse, grad_entropy: compute type, or undefined
  double scale;                                      // what the products multiply the logits' gradient by

  int64_t tokens() const { return hidden.size(0); }
  int64_t features() const { return hidden.size(1); }
  int64_t vocab() const { return classes; }
  // Of the rows of logits and of their gradient: each begins at a multiple of 16 bytes.
  int64_t stride() const { return std::max<int64_t>(8, (vocab() + 7) / 8 * 8); }
  bool wants_gradient() const { return cross_entropy::any(mask); }

 private:
  Tensor padded(const OptionalTensor& t) const {
    if (!t) return {};
    return at::constant_pad_nd(t->to(compute_type(hidden)), {0, stride() - vocab()}).contiguous();
  }
};

Work::Work(const Problem& problem) : Problem(problem), classes(problem.vocab.expect_int()), scale(1) {
  TORCH_CHECK(vocab() <= (int64_t{1} << 31) - 16, kOp, ": weight: expected fewer than 2^31 - 16 classes on CUDA, received ",
              vocab());
  TORCH_CHECK(filter_eps == 0, kOp, ": filter_eps: expected 0 on CUDA, where nothing is filtered, received ", filter_eps);
  target = target.contiguous();
  base = absmax ? BaseWeight::quantized(PackedReader(Backend::kCuda, kOp, weight, *absmax, nested, quant_type, block_size),
                                        classes, features(), hidden.options())
                : BaseWeight::dense(weight, weight.scalar_type());
  if (low) low_rows = low->to(hidden.scalar_type());
  if (up) up_rows = up->to(hidden.scalar_type());
  padded_bias = padded(bias);
  if (padded_bias.defined() && logit_scale != 1) padded_bias.mul_(logit_scale);
  padded_weights = padded(class_weights);
  if (padded_weights.defined()) total_weight = padded_weights.sum(at::kDouble).to(padded_weights.scalar_type());
  const OptionalTensor* given[] = {&grad_loss, &grad_lse, &grad_entropy};
  for (int i = 0; i < 3; ++i) {
    if (*given[i]) factors[i] = (*given[i])->to(compute_type(hidden)).contiguous();
  }
  // A power of two near a mean's 1 / count: in fp16 most of the logits' gradients would otherwise be rounded to zero. Not
  // below 2^-15, which keeps the largest, 1 / scale, finite in fp16.
  for (int64_t n = tokens(); averaged && n > 1 && scale > 0x1p-15; n /= 2) scale /= 2;
}

// How many tokens have logits at a time, and how many have a gradient of them: a wave, and a chunk of waves.
struct Plan {
  int64_t wave, chunk;
};

// `total` in equal parts of at most `most`; in multiples of a GEMM's tile, where that is no less.
int64_t even_part(int64_t total, int64_t most) {
  constexpr int64_t kTile = 128;
  most = std::max<int64_t>(1, most >= kTile ? most / kTile * kTile : most);
  const int64_t parts = (total + most - 1) / most;
  if (parts <= 1) return std::max<int64_t>(1, total);
  const int64_t even = (total + parts - 1) / parts;
  return most >= kTile ? (even + kTile - 1) / kTile * kTile : even;
}

// Every chunk but an only one is a pass over the fp32 accumulator of the weight's gradient, 8 * vocab * features bytes
// against 6 * chunk * features * vocab flops: on an H200 about 230 / chunk of a 16-bit problem's time. By default one
// chunk takes all tokens where their 16-bit gradient is no larger than that accumulator, which is then not needed. fp32
// accumulates in the result itself, and its flops are slow enough for small chunks.
Plan plan(const Work& p) {
  const int64_t logits = p.stride() * static_cast<int64_t>(at::elementSize(compute_type(p.hidden)));
  const bool narrow = p.wants_gradient() && p.hidden.scalar_type() != compute_type(p.hidden);
  int64_t wave, chunk;
  if (const int64_t bytes = p.workspace_mb << 20; bytes > 0) {
    wave = narrow ? std::max<int64_t>(1, bytes / 4 / logits) : bytes / logits;
    chunk = (bytes - wave * logits) / (logits / 2);
  } else {
    wave = std::max<int64_t>(narrow ? 128 : 1024, (int64_t{256} << 20) / logits);
    chunk = !p.mask[kWeight] ? 1024 : p.tokens() <= 2 * p.features() ? p.tokens() : std::max<int64_t>(2048, p.features());
  }
  if (!narrow) chunk = wave;
  chunk = even_part(p.tokens(), std::max(wave, chunk));
  return {even_part(chunk, wave), chunk};
}

// Rows from `begin` on, as many as `logits` has.
void start_rows(const Work& p, const Tensor& logits, const Tensor& gradient, int64_t begin, const Result& out) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
  const auto output = [&](const Tensor& t) {
    return t.defined() ? t.narrow(0, begin, logits.size(0)).mutable_data_ptr() : nullptr;
  };
  const auto from_begin = [&](const Tensor& t) { return t.defined() && t.dim() == 1 ? t.narrow(0, begin, logits.size(0)) : t; };
  kernels::CrossEntropyRows rows{};
  rows.logits = logits.mutable_data_ptr();
  rows.tokens = logits.size(0);
  rows.vocab = p.vocab();
  rows.stride = p.stride();
  rows.target = p.target.const_data_ptr<int64_t>() + begin;
  rows.ignore_index = p.ignore_index;
  rows.bias = pointer(p.padded_bias);
  rows.class_weights = pointer(p.padded_weights);
  rows.total_weight = pointer(p.total_weight);
  rows.label_smoothing = p.label_smoothing;
  rows.z_loss = p.z_loss;
  rows.softcap = p.softcap;
  rows.grad_loss = pointer(from_begin(p.factors[0]));
  rows.grad_lse = pointer(from_begin(p.factors[1]));
  rows.grad_entropy = pointer(from_begin(p.factors[2]));
  const auto stride = [](const Tensor& t) { return static_cast<int64_t>(t.defined() && t.dim() == 1); };
  rows.grad_loss_stride = stride(p.factors[0]);
  rows.grad_lse_stride = stride(p.factors[1]);
  rows.grad_entropy_stride = stride(p.factors[2]);
  rows.factor = 1 / p.scale;
  rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  rows.loss = output(out.loss);
  rows.lse = output(out.lse);
  rows.entropy = output(out.entropy);
  rows.argmax = static_cast<int64_t*>(output(out.argmax));
  const auto& kernels = cuda::table<kernels::LinearCrossEntropyCuda>(kOp);
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
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const auto [wave, chunk] = plan(p);
  const bool gradient = p.wants_gradient();
  const double scale = p.scale * p.logit_scale;
  Tensor logits = at::empty({std::min(wave, p.tokens()), p.stride()}, compute);
  Tensor grad_logits;
  if (gradient) {
    grad_logits = p.hidden.scalar_type() == logits.scalar_type()
                      ? logits
                      : at::empty({std::min(chunk, p.tokens()), p.stride()}, p.hidden.options());
  }
  const Tensor ignored = p.target.eq(p.ignore_index).unsqueeze(1);

  Result out;
  out.loss = at::empty({p.tokens()}, compute);
  out.lse = at::empty({p.tokens()}, compute);
  if (p.stats) {
    out.entropy = at::empty({p.tokens()}, compute);
    out.argmax = at::empty({p.tokens()}, compute.dtype(at::kLong));
  }
  const auto start = [&](at::IntArrayRef shape, at::TensorOptions options) {
    return p.tokens() == 0 ? at::zeros(shape, options) : at::empty(shape, options);
  };
  auto& gradients = out.gradients;
  if (p.mask[kHidden]) gradients[kHidden] = at::empty_like(p.hidden, at::MemoryFormat::Contiguous);
  // Several chunks are summed in fp32 and rounded once; a single one writes the result.
  if (p.mask[kWeight]) {
    gradients[kWeight] =
        p.weight_grad ? *p.weight_grad : start(p.weight.sizes(), chunk < p.tokens() ? compute : p.weight.options());
  }
  if (p.mask[kBias]) gradients[kBias] = at::zeros({p.vocab()}, compute);
  if (p.mask[kLow]) gradients[kLow] = at::empty({p.tokens(), p.low_rows.size(1)}, p.hidden.options());
  if (p.mask[kUp]) gradients[kUp] = at::zeros(p.up->sizes(), compute);

  for (int64_t begin = 0; begin < p.tokens(); begin += chunk) {
    const int64_t tokens = std::min(chunk, p.tokens() - begin);
    // What an ignored token holds must not show, and 0 * inf would.
    const auto counted = [&](const Tensor& t) {
      return t.narrow(0, begin, tokens).masked_fill(ignored.narrow(0, begin, tokens), 0);
    };
    const Tensor x = counted(p.hidden), low = p.low_rows.defined() ? counted(p.low_rows) : Tensor();
    for (int64_t first = 0; first < tokens; first += wave) {
      const int64_t some = std::min(wave, tokens - first);
      Tensor z = logits.narrow(0, 0, some);
      p.base.for_each_panel([&](int64_t v, const Tensor& panel) {
        gemm(z.narrow(1, v, panel.size(0)), x.narrow(0, first, some), panel.t(), /*beta=*/0, p.logit_scale);
      });
      if (low.defined()) gemm(z.narrow(1, 0, p.vocab()), low.narrow(0, first, some), p.up_rows.t(), /*beta=*/1, p.logit_scale);
      start_rows(p, z, gradient ? grad_logits.narrow(0, first, some) : Tensor(), begin + first, out);
    }
    if (!gradient) continue;
    Tensor grad = grad_logits.narrow(0, 0, tokens).narrow(1, 0, p.vocab());
    if (p.mask[kHidden]) {  // of several panels, a sum in fp32 that is rounded once
      const Tensor result = gradients[kHidden].narrow(0, begin, tokens);
      const Tensor sum = p.base.one_panel() ? result : at::empty(result.sizes(), compute);
      p.base.for_each_panel([&](int64_t v, const Tensor& panel) {
        gemm(sum, grad.narrow(1, v, panel.size(0)), panel, /*beta=*/v == 0 ? 0 : 1, scale);
      });
      if (!p.base.one_panel()) result.copy_(sum);
    }
    const double beta = begin == 0 && !p.weight_grad ? 0 : 1;
    if (p.mask[kWeight]) gemm(gradients[kWeight], grad.t(), x, beta, scale);
    if (p.mask[kBias]) gradients[kBias].add_(grad.sum(0, /*keepdim=*/false, compute_type(p.hidden)), scale);
    if (p.mask[kLow]) gemm(gradients[kLow].narrow(0, begin, tokens), grad, p.up_rows, /*beta=*/0, scale);
    if (p.mask[kUp]) gemm(gradients[kUp], grad.t(), low, /*beta=*/1, scale);
  }
  const auto narrow = [&](int i, const Tensor& like) {
    if (p.mask[i]) gradients[i] = gradients[i].to(like.scalar_type());
  };
  if (!p.weight_grad) narrow(kWeight, p.weight);
  if (p.bias) narrow(kBias, *p.bias);
  if (p.low) narrow(kLow, *p.low);
  if (p.up) narrow(kUp, *p.up);
  return out;
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("linear_cross_entropy_rows", torch::CppFunction::makeFromBoxedFunction<&cross_entropy::boxed<rows>>());
}

}  // namespace
}  // namespace shoestring
