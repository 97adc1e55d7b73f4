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
using cross_entropy::kOp;
using cross_entropy::Mask;
using cross_entropy::Result;
using OptionalTensor = std::optional<Tensor>;

struct Problem {
  Tensor hidden, weight, target, bias;  // (tokens, features), (vocab, features), (tokens), (stride) compute or undefined
  int64_t ignore_index;
  double label_smoothing, softcap;
  int64_t workspace_mb;
  Mask mask;

  int64_t tokens() const { return hidden.size(0); }
  int64_t features() const { return hidden.size(1); }
  int64_t vocab() const { return weight.size(0); }
  int64_t stride() const { return row_stride(weight.size(0)); }
  // Of the rows of logits and of their gradient: each begins at a multiple of 16 bytes.
  static int64_t row_stride(int64_t vocab) { return std::max<int64_t>(8, (vocab + 7) / 8 * 8); }
};

Problem flatten(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                int64_t ignore_index, double label_smoothing, double softcap, int64_t workspace_mb, Mask mask) {
  const int64_t vocab = weight.size(0);
  TORCH_CHECK(vocab <= (int64_t{1} << 31) - 16, kOp, ": weight: expected fewer than 2^31 - 16 classes on CUDA, received ",
              vocab);
  Tensor padded;
  if (bias.has_value()) {
    padded = at::constant_pad_nd(bias->to(compute_type(hidden)), {0, Problem::row_stride(vocab) - vocab}).contiguous();
  }
  return {as_matrix(hidden), weight, target.reshape({-1}).contiguous(), padded, ignore_index, label_smoothing, softcap,
          workspace_mb, mask};
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
Plan plan(const Problem& p) {
  const int64_t logits = p.stride() * static_cast<int64_t>(at::elementSize(compute_type(p.hidden)));
  const bool narrow = cross_entropy::any(p.mask) && p.hidden.scalar_type() != compute_type(p.hidden);
  int64_t wave, chunk;
  if (const int64_t bytes = p.workspace_mb << 20; bytes > 0) {
    wave = narrow ? std::max<int64_t>(1, bytes / 4 / logits) : bytes / logits;
    chunk = (bytes - wave * logits) / (logits / 2);
  } else {
    wave = std::max<int64_t>(narrow ? 128 : 1024, (int64_t{256} << 20) / logits);
    chunk = !p.mask[1] ? 1024 : p.tokens() <= 2 * p.features() ? p.tokens() : std::max<int64_t>(2048, p.features());
  }
  if (!narrow) chunk = wave;
  chunk = even_part(p.tokens(), std::max(wave, chunk));
  return {even_part(chunk, wave), chunk};
}

// Rows from `begin` on, as many as `logits` has.
void start_rows(const Problem& p, const Tensor& logits, const Tensor& gradient, int64_t begin, const Tensor& factor,
                const Tensor& loss) {
  kernels::CrossEntropyRows rows{};
  rows.logits = logits.mutable_data_ptr();
  rows.tokens = logits.size(0);
  rows.vocab = p.vocab();
  rows.stride = p.stride();
  rows.target = p.target.const_data_ptr<int64_t>() + begin;
  rows.ignore_index = p.ignore_index;
  rows.bias = p.bias.defined() ? p.bias.const_data_ptr() : nullptr;
  rows.factor_per_row = factor.dim() == 1;
  rows.factor = (rows.factor_per_row ? factor.narrow(0, begin, rows.tokens) : factor).const_data_ptr();
  rows.label_smoothing = p.label_smoothing;
  rows.softcap = p.softcap;
  rows.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  rows.loss = loss.narrow(0, begin, rows.tokens).mutable_data_ptr();
  const auto& kernels = cuda::table<kernels::LinearCrossEntropyCuda>(kOp);
  const auto dtype = p.hidden.scalar_type();
  const auto run = dtype == at::kDouble     ? kernels.rows_double
                   : dtype == at::kFloat    ? kernels.rows_float
                   : dtype == at::kBFloat16 ? kernels.rows_bf16
                                            : kernels.rows_fp16;
  check_launch(kOp, run(rows, stream_of(p.hidden)));
}

// The gradients are multiplied by factor * scale; factor, compute type, is () or (tokens).
Result run(const Problem& p, const Tensor& factor, double scale) {
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const auto [wave, chunk] = plan(p);
  const bool gradient = cross_entropy::any(p.mask);
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
  const auto start = [&](at::IntArrayRef shape, at::TensorOptions options) {
    return p.tokens() == 0 ? at::zeros(shape, options) : at::empty(shape, options);
  };
  if (p.mask[0]) out.grad_hidden = at::empty_like(p.hidden, at::MemoryFormat::Contiguous);
  // Several chunks are summed in fp32 and rounded once; a single one writes the result.
  if (p.mask[1]) out.grad_weight = start(p.weight.sizes(), chunk < p.tokens() ? compute : p.weight.options());
  if (p.mask[2]) out.grad_bias = at::zeros({p.vocab()}, compute);

  for (int64_t begin = 0; begin < p.tokens(); begin += chunk) {
    const int64_t tokens = std::min(chunk, p.tokens() - begin);
    // What an ignored token holds must not show, and 0 * inf would.
    Tensor x = p.hidden.narrow(0, begin, tokens).masked_fill(ignored.narrow(0, begin, tokens), 0);
    for (int64_t first = 0; first < tokens; first += wave) {
      const int64_t some = std::min(wave, tokens - first);
      Tensor z = logits.narrow(0, 0, some);
      gemm(z.narrow(1, 0, p.vocab()), x.narrow(0, first, some), p.weight.t());
      start_rows(p, z, gradient ? grad_logits.narrow(0, first, some) : Tensor(), begin + first, factor, out.loss);
    }
    if (!gradient) continue;
    Tensor grad = grad_logits.narrow(0, 0, tokens).narrow(1, 0, p.vocab());
    if (p.mask[0]) gemm(out.grad_hidden.narrow(0, begin, tokens), grad, p.weight, /*beta=*/0, scale);
    if (p.mask[1]) gemm(out.grad_weight, grad.t(), x, /*beta=*/begin == 0 ? 0 : 1, scale);
    if (p.mask[2]) out.grad_bias.add_(grad.sum(0, /*keepdim=*/false, compute_type(p.hidden)), scale);
  }
  if (p.mask[1]) out.grad_weight = out.grad_weight.to(p.weight.scalar_type());
  if (p.mask[2]) out.grad_bias = out.grad_bias.to(p.weight.scalar_type());
  return out;
}

// 1 / how many tokens count: infinite for none, when nothing is multiplied by it.
Tensor share(const Problem& p) { return p.target.ne(p.ignore_index).sum(at::kDouble).reciprocal(); }

// A power of two near the mean's 1 / count, which the products bring in: in fp16 most of the logits' gradients would
// otherwise be rounded to zero. Not below 2^-15, which keeps the largest, 1 / scale, finite in fp16.
double scale_of(const Problem& p, bool mean) {
  double scale = 1;
  for (int64_t n = p.tokens(); mean && n > 1 && scale > 0x1p-15; n /= 2) scale /= 2;
  return scale;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                                        const OptionalTensor& bias, int64_t ignore_index,
                                                        c10::string_view reduction, double label_smoothing,
                                                        double softcap, int64_t workspace_mb, Mask mask) {
  cross_entropy::check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  const c10::OptionalDeviceGuard guard(hidden.device());
  Problem p = flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
  const bool mean = reduction == "mean";
  const double scale = scale_of(p, mean);
  const auto compute = compute_type(hidden);
  const Tensor count_share = mean ? share(p) : Tensor();
  Tensor factor = mean ? count_share.div(scale).to(compute) : at::ones({}, hidden.options().dtype(compute));
  Result r = run(p, factor, scale);
  if (reduction == "none") {
    r.loss = r.loss.view(target.sizes());
  } else {
    // In double, and NaN for a mean over nothing, as in PyTorch: 0 * inf.
    Tensor total = r.loss.sum(at::kDouble);
    r.loss = (mean ? total.mul(count_share) : total).to(compute);
  }
  return std::tuple_cat(std::make_tuple(r.loss), cross_entropy::gradients(r, hidden));
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_output, const Tensor& hidden, const Tensor& weight,
                                                 const Tensor& target, const OptionalTensor& bias, int64_t ignore_index,
                                                 c10::string_view reduction, double label_smoothing, double softcap,
                                                 int64_t workspace_mb, Mask mask) {
  cross_entropy::check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  const c10::OptionalDeviceGuard guard(hidden.device());
  Problem p = flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
  const bool mean = reduction == "mean";
  const double scale = scale_of(p, mean);
  Tensor upstream = grad_output.to(at::kDouble).expand(target.sizes()).reshape({-1});
  if (mean) upstream = upstream.mul(share(p)).div(scale);
  return cross_entropy::gradients(run(p, upstream.to(compute_type(hidden)).contiguous(), scale), hidden);
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("linear_cross_entropy_forward", forward_cuda);
  m.impl("linear_cross_entropy_backward", backward_cuda);
}

}  // namespace
}  // namespace shoestring
