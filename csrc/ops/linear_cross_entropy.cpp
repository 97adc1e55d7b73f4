#include <cmath>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/linear_cross_entropy.h"
#include "ops/base_weight.h"
#include "ops/call.h"

namespace shoestring {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Mask = std::array<bool, 3>;

constexpr const char* kOp = "linear_cross_entropy";

void check(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
           c10::string_view reduction, double label_smoothing, double softcap, int64_t workspace_mb) {
  TORCH_CHECK(hidden.dim() >= 1, kOp, ": hidden: expected shape (..., features), received a scalar");
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == hidden.sym_size(-1), kOp, ": weight: expected shape (vocab, ",
              hidden.sym_size(-1), "), features as in hidden, received ", weight.sym_sizes());
  TORCH_CHECK(target.sym_sizes() == hidden.sym_sizes().slice(0, hidden.dim() - 1), kOp,
              ": target: expected hidden's shape without its last dimension, ",
              hidden.sym_sizes().slice(0, hidden.dim() - 1), ", received ", target.sym_sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong, kOp, ": target: expected int64, received ", target.scalar_type(),
              "; call target.long()");
  TORCH_CHECK(at::isFloatingType(hidden.scalar_type()), kOp, ": hidden: expected fp32, fp64, bf16 or fp16, received ",
              hidden.scalar_type());
  TORCH_CHECK(weight.scalar_type() == hidden.scalar_type(), kOp, ": weight: expected hidden's dtype, ",
              hidden.scalar_type(), ", received ", weight.scalar_type());
  TORCH_CHECK(weight.device() == hidden.device() && target.device() == hidden.device(), kOp,
              ": weight and target: expected hidden's device, ", hidden.device(), ", received ", weight.device(), " and ",
              target.device());
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kOp, ": bias: expected shape (",
                weight.sym_size(0), "), received ", bias->sym_sizes());
    TORCH_CHECK(bias->scalar_type() == hidden.scalar_type() && bias->device() == hidden.device(), kOp,
                ": bias: expected hidden's dtype and device, ", hidden.scalar_type(), " on ", hidden.device(),
                ", received ", bias->scalar_type(), " on ", bias->device());
  }
  TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", kOp,
              ": reduction: expected 'mean', 'sum' or 'none', received '", reduction, "'");
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing < 1, kOp, ": label_smoothing: expected a number in [0, 1), received ",
              label_smoothing);
  TORCH_CHECK(softcap >= 0 && std::isfinite(softcap), kOp, ": softcap: expected 0 (none) or a positive number, received ",
              softcap);
  TORCH_CHECK(workspace_mb >= 1, kOp, ": workspace_mb: expected at least 1, received ", workspace_mb);
}

at::ScalarType loss_type(const Tensor& hidden) {
  return hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// What the loop below needs beside the tensors. upstream (tokens), in the compute type, is each token's factor.
struct Problem {
  Tensor hidden, weight, target, bias;  // (tokens, features), (vocab, features), (tokens), (vocab) or undefined
  std::vector<int64_t> rows;            // the tokens that count
  double label_smoothing, softcap;
  int64_t workspace_mb;
  Mask mask;
};

std::vector<int64_t> rows_that_count(const Tensor& target, int64_t vocab, int64_t ignore_index) {
  std::vector<int64_t> rows;
  rows.reserve(target.numel());
  const int64_t* t = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i) {
    if (t[i] == ignore_index) continue;
    TORCH_CHECK_INDEX(t[i] >= 0 && t[i] < vocab, kOp, ": target: expected classes in [0, ", vocab,
                      ") or ignore_index, ", ignore_index, ", received ", t[i], " at position ", i);
    rows.push_back(i);
  }
  return rows;
}

Problem flatten(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                int64_t ignore_index, double label_smoothing, double softcap, int64_t workspace_mb, Mask mask) {
  Tensor flat = target.reshape({-1}).contiguous();
  auto rows = rows_that_count(flat, weight.size(0), ignore_index);
  Tensor compute_bias = bias.has_value() ? bias->to(loss_type(hidden)).contiguous() : Tensor();
  return {hidden.reshape({-1, hidden.size(-1)}), weight, flat, compute_bias, std::move(rows), label_smoothing, softcap,
          workspace_mb, mask};
}

struct Result {
  Tensor loss;  // (rows that count), compute type
  Tensor grad_hidden, grad_weight, grad_bias;
};

// `factor(i)` is what the loss of the i-th row that counts is multiplied by, for the gradients.
template <class T, class Factor>
Result run(const Problem& p, Factor factor) {
  const auto compute = p.hidden.options().dtype(c10::CppTypeToScalarType<T>::value);
  const int64_t features = p.hidden.size(1), vocab = p.weight.size(0), count = p.rows.size();
  const bool gradient = p.mask[0] || p.mask[1] || p.mask[2];
  const bool widen = p.weight.scalar_type() != compute.dtype().toScalarType();

  Result out;
  out.loss = at::empty({count}, compute);
  if (p.mask[0]) {
    // Tokens that do not count have a zero gradient, and nobody else writes it.
    out.grad_hidden = count == p.hidden.size(0) ? at::empty_like(p.hidden, at::MemoryFormat::Contiguous)
                                                : at::zeros_like(p.hidden, at::MemoryFormat::Contiguous);
  }
  if (p.mask[1]) out.grad_weight = at::zeros({vocab, features}, compute);
  if (p.mask[2]) out.grad_bias = at::zeros({vocab}, compute);

  // 16-bit weights are widened a panel of the vocabulary at a time, in a buffer that stays in cache.
  const int64_t panel = widen ? std::max<int64_t>(64, (int64_t{8} << 20) / (features * sizeof(T))) : vocab;
  // Where the CPU has bf16 units the products of the gradients use them. The logits stay fp32 everywhere.
  const bool narrow = gradient && widen && product_type(p.hidden) == at::kBFloat16;
  const int64_t bytes = p.workspace_mb << 20;
  int64_t chunk = std::max<int64_t>(1, bytes / (vocab * static_cast<int64_t>(sizeof(T) + (narrow ? 2 : 0))));
  chunk = std::min<int64_t>(chunk > 16 ? chunk / 16 * 16 : chunk, std::min<int64_t>(count, 1024));
  Tensor logits = at::empty({chunk, vocab}, compute);
  Tensor rounded = narrow ? at::empty({chunk, vocab}, p.hidden.options()) : Tensor();
  Tensor widened = widen ? at::empty({std::min(panel, vocab), features}, compute) : Tensor();
  const auto weight_panel = [&](int64_t begin, int64_t size) {
    Tensor part = p.weight.narrow(0, begin, size);
    return widen ? widened.narrow(0, 0, size).copy_(part) : part;
  };

  const auto& kernels = cpu::linear_cross_entropy();
  T* losses = out.loss.template data_ptr<T>();
  const T* bias = p.bias.defined() ? p.bias.template const_data_ptr<T>() : nullptr;
  const int64_t* target = p.target.template const_data_ptr<int64_t>();

  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t tokens = std::min(chunk, count - begin);
    Tensor index = at::from_blob(const_cast<int64_t*>(p.rows.data() + begin), {tokens}, at::kLong);
    Tensor gathered = p.hidden.index_select(0, index);  // (tokens, features)
    Tensor x = gathered.to(compute);
    Tensor z = logits.narrow(0, 0, tokens);  // (tokens, vocab)
    for (int64_t v = 0; v < vocab; v += panel) {
      const int64_t size = std::min(panel, vocab - v);
      Tensor part = z.narrow(1, v, size);
      at::mm_out(part, x, weight_panel(v, size).t());
    }

    Tensor scale = at::empty({tokens, 1}, compute);
    T* scales = scale.template data_ptr<T>();
    T* rows = z.template data_ptr<T>();
    at::parallel_for(0, tokens, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const kernels::CrossEntropyRow row{vocab, target[p.rows[begin + i]], p.label_smoothing, p.softcap, gradient};
        kernels::CrossEntropyResult r;
        if constexpr (std::is_same_v<T, float>) {
          r = kernels.row_float(rows + i * vocab, bias, row);
        } else {
          r = kernels.row_double(rows + i * vocab, bias, row);
        }
        losses[begin + i] = static_cast<T>(r.loss);
        scales[i] = static_cast<T>(r.scale * factor(begin + i));
      }
    });
    if (!gradient) continue;

    if (narrow) {
      // As in eager PyTorch with fp32 logits: their gradient is rounded to bf16 once, and then multiplied.
      Tensor grad_logits = rounded.narrow(0, 0, tokens);
      at::mul_out(grad_logits, z, scale);
      if (p.mask[0]) out.grad_hidden.index_copy_(0, index, at::mm(grad_logits, p.weight));
      if (p.mask[1]) {
        for (int64_t v = 0; v < vocab; v += panel) {
          const int64_t size = std::min(panel, vocab - v);
          out.grad_weight.narrow(0, v, size).add_(at::mm(grad_logits.narrow(1, v, size).t(), gathered));
        }
      }
      if (p.mask[2]) out.grad_bias.add_(grad_logits.sum(0, false, compute.dtype().toScalarType()));
      continue;
    }
    // The gradient of the logits is diag(scale) z, so
    //   grad_hidden = diag(scale) (z W),  grad_weight += z^T (diag(scale) x),  grad_bias += z^T scale.
    if (p.mask[0]) {
      Tensor grad = at::empty({tokens, features}, compute);
      for (int64_t v = 0; v < vocab; v += panel) {
        const int64_t size = std::min(panel, vocab - v);
        at::addmm_out(grad, grad, z.narrow(1, v, size), weight_panel(v, size), /*beta=*/v == 0 ? 0 : 1, /*alpha=*/1);
      }
      out.grad_hidden.index_copy_(0, index, grad.mul_(scale).to(p.hidden.scalar_type()));
    }
    if (p.mask[1]) out.grad_weight.addmm_(z.t(), x.mul_(scale));
    if (p.mask[2]) out.grad_bias.addmv_(z.t(), scale.squeeze(1));
  }

  if (p.mask[1]) out.grad_weight = out.grad_weight.to(p.weight.scalar_type());
  if (p.mask[2]) out.grad_bias = out.grad_bias.to(p.weight.scalar_type());
  return out;
}

template <class Factor>
Result run(const Problem& p, Factor factor) {
  return loss_type(p.hidden) == at::kDouble ? run<double>(p, factor) : run<float>(p, factor);
}

Tensor or_empty(const Tensor& t, const Tensor& like) { return t.defined() ? t : at::empty({0}, like.options()); }

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                                       const OptionalTensor& bias, int64_t ignore_index,
                                                       c10::string_view reduction, double label_smoothing,
                                                       double softcap, int64_t workspace_mb, Mask mask) {
  check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  Problem p =
      flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
  const int64_t count = p.rows.size();
  const double factor = reduction == "mean" && count > 0 ? 1.0 / count : 1.0;
  Result r = run(p, [factor](int64_t) { return factor; });
  Tensor loss;
  if (reduction == "none") {
    loss = at::zeros(p.target.sizes(), r.loss.options());
    loss.index_copy_(0, at::from_blob(p.rows.data(), {count}, at::kLong), r.loss);
    loss = loss.view(target.sizes());
  } else {
    // In double, and NaN for a mean over nothing, as in PyTorch.
    Tensor total = r.loss.sum(at::kDouble);
    loss = (reduction == "mean" ? total.div(count) : total).to(r.loss.scalar_type());
  }
  Tensor grad_hidden = mask[0] ? r.grad_hidden.view(hidden.sizes()) : r.grad_hidden;
  return {loss, or_empty(grad_hidden, hidden), or_empty(r.grad_weight, hidden), or_empty(r.grad_bias, hidden)};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_output, const Tensor& hidden, const Tensor& weight,
                                                const Tensor& target, const OptionalTensor& bias, int64_t ignore_index,
                                                c10::string_view reduction, double label_smoothing, double softcap,
                                                int64_t workspace_mb, Mask mask) {
  check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  Problem p =
      flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
  const double share = reduction == "mean" && !p.rows.empty() ? 1.0 / p.rows.size() : 1.0;
  Tensor upstream = grad_output.to(at::kDouble).expand(target.sizes()).reshape({-1}).contiguous();
  const double* u = upstream.const_data_ptr<double>();
  Result r = run(p, [&](int64_t i) { return share * u[p.rows[i]]; });
  Tensor grad_hidden = mask[0] ? r.grad_hidden.view(hidden.sizes()) : r.grad_hidden;
  return {or_empty(grad_hidden, hidden), or_empty(r.grad_weight, hidden), or_empty(r.grad_bias, hidden)};
}

std::tuple<Tensor, Tensor, Tensor> empty_gradients(const Tensor& hidden, const Tensor& weight, Mask mask) {
  const auto none = [&] { return at::empty({0}, hidden.options()); };
  return {mask[0] ? at::empty_like(hidden, at::MemoryFormat::Contiguous) : none(),
          mask[1] ? at::empty_like(weight, at::MemoryFormat::Contiguous) : none(),
          mask[2] ? at::empty_symint({weight.sym_size(0)}, weight.options()) : none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_meta(const Tensor& hidden, const Tensor& weight,
                                                        const Tensor& target, const OptionalTensor& bias,
                                                        int64_t ignore_index, c10::string_view reduction,
                                                        double label_smoothing, double softcap, int64_t workspace_mb,
                                                        Mask mask) {
  check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  auto [grad_hidden, grad_weight, grad_bias] = empty_gradients(hidden, weight, mask);
  const auto options = hidden.options().dtype(loss_type(hidden));
  Tensor loss =
      reduction == "none" ? at::empty_symint(target.sym_sizes(), options) : at::empty_symint({}, options);
  return {loss, grad_hidden, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& hidden, const Tensor& weight,
                                                 const Tensor&, const OptionalTensor&, int64_t, c10::string_view, double,
                                                 double, int64_t, Mask mask) {
  return empty_gradients(hidden, weight, mask);
}

// Without gradients the operator is its forward part, on every device.
Tensor loss_only(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
                 int64_t ignore_index, c10::string_view reduction, double label_smoothing, double softcap,
                 int64_t workspace_mb) {
  static auto op = find<decltype(forward_cpu)>("shoestring::linear_cross_entropy_forward");
  return std::get<0>(op.call(hidden, weight, target, bias, ignore_index, reduction, label_smoothing, softcap,
                             workspace_mb, Mask{false, false, false}));
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("linear_cross_entropy_forward", forward_cpu);
  m.impl("linear_cross_entropy_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("linear_cross_entropy_forward", forward_meta);
  m.impl("linear_cross_entropy_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("linear_cross_entropy", loss_only); }

}  // namespace

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                            const OptionalTensor& bias, const LinearCrossEntropyOptions& options) {
  static auto op = find<decltype(loss_only)>("shoestring::linear_cross_entropy");
  return op.call(hidden, weight, target, bias, options.ignore_index(), options.reduction(), options.label_smoothing(),
                 options.softcap(), options.workspace_mb());
}

}  // namespace shoestring
