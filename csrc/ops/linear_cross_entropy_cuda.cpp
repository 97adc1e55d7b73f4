// Tokens go in waves: the GEMM writes a wave's logits in fp32, the row kernel turns them into their gradient in place,
// and two more GEMMs read that. Nothing waits for the GPU: how many tokens count is known on the device only, so tokens
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
  // Of the rows of logits: each begins, and so does its upper half, at a multiple of 16 bytes.
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

// Tokens of a wave. More waves cost more passes over the fp32 accumulator of the weight's gradient, 8 * vocab * features
// bytes each, against 6 * tokens * features * vocab flops: on an H200 about 230 / tokens of the time. By default all
// tokens go at once where their logits are not twice that accumulator, which is then not needed; else as many as have
// logits of its size: with it, 8 * vocab * features bytes either way. Without the weight's gradient 1024 tokens keep
// the products busy. Small problems take 256 MiB.
int64_t tokens_of_wave(const Problem& p, int64_t bytes_per_token) {
  int64_t most = (p.workspace_mb << 20) / bytes_per_token;
  if (p.workspace_mb == 0) {
    most = std::max<int64_t>(1024, (int64_t{256} << 20) / bytes_per_token);
    if (p.mask[1]) most = std::max(most, p.tokens() <= 2 * p.features() ? p.tokens() : p.features());
  }
  constexpr int64_t kTile = 128;  // of the GEMMs: whole ones, and waves of like size
  most = std::max<int64_t>(1, most >= kTile ? most / kTile * kTile : most);
  const int64_t waves = (p.tokens() + most - 1) / most;
  if (waves <= 1) return std::max<int64_t>(1, p.tokens());
  const int64_t even = (p.tokens() + waves - 1) / waves;
  return most >= kTile ? (even + kTile - 1) / kTile * kTile : even;
}

void start_rows(const Problem& p, const Tensor& logits, int64_t begin, const Tensor& factor, const Tensor& loss) {
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
  rows.gradient = cross_entropy::any(p.mask);
  rows.loss = loss.narrow(0, begin, rows.tokens).mutable_data_ptr();
  const auto& kernels = cuda::table<kernels::LinearCrossEntropyCuda>(kOp);
  const auto dtype = p.hidden.scalar_type();
  const auto run = dtype == at::kDouble     ? kernels.rows_double
                   : dtype == at::kFloat    ? kernels.rows_float
                   : dtype == at::kBFloat16 ? kernels.rows_bf16
                                            : kernels.rows_fp16;
  check_launch(kOp, run(rows, stream_of(p.hidden)));
}

// The gradient that the row kernel left in `logits` (tokens, stride): (tokens, vocab), in hidden's dtype.
Tensor gradient_in(const Tensor& logits, const Problem& p) {
  const auto dtype = p.hidden.scalar_type();
  if (dtype == logits.scalar_type()) return logits.narrow(1, 0, p.vocab());
  return logits.view(dtype).narrow(1, p.stride(), p.vocab());
}

// The gradients are multiplied by factor * scale; factor, compute type, is () or (tokens).
Result run(const Problem& p, const Tensor& factor, double scale) {
  const auto compute = p.hidden.options().dtype(compute_type(p.hidden));
  const int64_t bytes_per_token = p.stride() * static_cast<int64_t>(compute.dtype().itemsize());
  const int64_t wave = tokens_of_wave(p, bytes_per_token);
  Tensor logits = at::empty({std::min(wave, p.tokens()), p.stride()}, compute);
  const Tensor ignored = p.target.eq(p.ignore_index).unsqueeze(1);

  Result out;
  out.loss = at::empty({p.tokens()}, compute);
  const auto start = [&](at::IntArrayRef shape, at::TensorOptions options) {
    return p.tokens() == 0 ? at::zeros(shape, options) : at::empty(shape, options);
  };
  if (p.mask[0]) out.grad_hidden = at::empty_like(p.hidden, at::MemoryFormat::Contiguous);
  // Several waves are summed in fp32 and rounded once; a single one writes the result.
  if (p.mask[1]) out.grad_weight = start(p.weight.sizes(), wave < p.tokens() ? compute : p.weight.options());
  if (p.mask[2]) out.grad_bias = at::zeros({p.vocab()}, compute);

  for (int64_t begin = 0; begin < p.tokens(); begin += wave) {
    const int64_t tokens = std::min(wave, p.tokens() - begin);
    // What an ignored token holds must not show, and 0 * inf would.
    Tensor x = p.hidden.narrow(0, begin, tokens).masked_fill(ignored.narrow(0, begin, tokens), 0);
    Tensor z = logits.narrow(0, 0, tokens);
    gemm(z.narrow(1, 0, p.vocab()), x, p.weight.t());
    start_rows(p, z, begin, factor, out.loss);
    if (!cross_entropy::any(p.mask)) continue;
    Tensor grad = gradient_in(z, p);
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
