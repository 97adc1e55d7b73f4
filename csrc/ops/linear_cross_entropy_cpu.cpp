#include <algorithm>
#include <type_traits>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "kernels/linear_cross_entropy.h"
#include "ops/base_weight.h"
#include "ops/linear_cross_entropy.h"

namespace shoestring {
namespace {

using at::Tensor;
using cross_entropy::kOp;
using cross_entropy::Mask;
using cross_entropy::Result;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kDefaultWorkspaceMb = 64;

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
  Tensor compute_bias = bias.has_value() ? bias->to(compute_type(hidden)).contiguous() : Tensor();
  return {as_matrix(hidden), weight, flat, compute_bias, std::move(rows), label_smoothing, softcap,
          workspace_mb == 0 ? kDefaultWorkspaceMb : workspace_mb, mask};
}

// One call of the operator, a chunk of the tokens that count at a time.
template <class T>
class Run {
 public:
  explicit Run(const Problem& problem);

  // factor(i): what the loss of the i-th token that counts is multiplied by, for the gradients.
  template <class Factor>
  Result operator()(Factor factor) {
    for (int64_t begin = 0; begin < count_; begin += chunk_) add_chunk(begin, factor);
    if (p_.mask[1]) out_.grad_weight = out_.grad_weight.to(p_.weight.scalar_type());
    if (p_.mask[2]) out_.grad_bias = out_.grad_bias.to(p_.weight.scalar_type());
    return out_;
  }

 private:
  template <class Factor>
  void add_chunk(int64_t begin, Factor factor);
  // z (tokens, vocab) = x (tokens, features) weight^T.
  void make_logits(const Tensor& x, Tensor& z) const;
  // What the kernel makes of rows of logits; the rows' losses go to out_, and their scales are returned: (tokens, 1).
  template <class Factor>
  Tensor reduce_rows(Tensor& z, int64_t begin, Factor factor);
  void add_gradients(const Tensor& z, const Tensor& scale, Tensor& x, const Tensor& index);
  void add_rounded_gradients(const Tensor& z, const Tensor& scale, const Tensor& x, const Tensor& index);

  // Calls body(begin, size) for the panels of the vocabulary.
  template <class Body>
  void for_each_panel(Body body) const {
    for (int64_t v = 0; v < vocab_; v += panel_) body(v, std::min(panel_, vocab_ - v));
  }
  Tensor weight_panel(int64_t begin, int64_t size) const {
    Tensor part = p_.weight.narrow(0, begin, size);
    return widened_.defined() ? widened_.narrow(0, 0, size).copy_(part) : part;
  }

  const Problem& p_;
  const at::TensorOptions compute_;
  const int64_t features_, vocab_, count_;
  const bool gradient_;
  bool narrow_;           // the products of the gradients are bf16
  int64_t panel_, chunk_;  // classes, tokens
  Tensor logits_;         // (chunk, vocab)
  Tensor rounded_;        // (chunk, vocab), for narrow_
  Tensor widened_;        // (panel, features), for 16-bit weights
  Result out_;
};

template <class T>
Run<T>::Run(const Problem& problem)
    : p_(problem), compute_(p_.hidden.options().dtype(c10::CppTypeToScalarType<T>::value)),
      features_(p_.hidden.size(1)), vocab_(p_.weight.size(0)), count_(p_.rows.size()),
      gradient_(cross_entropy::any(p_.mask)) {
  // 16-bit weights are widened a panel of the vocabulary at a time, in a buffer that stays in cache.
  const bool widen = p_.weight.scalar_type() != compute_.dtype().toScalarType();
  panel_ = widen ? std::max<int64_t>(64, (int64_t{8} << 20) / std::max<int64_t>(1, features_ * sizeof(T))) : vocab_;
  // Where the CPU has bf16 units the products of the gradients use them. The logits stay fp32 everywhere.
  narrow_ = gradient_ && widen && product_type(p_.hidden) == at::kBFloat16;
  const int64_t bytes_per_token = std::max<int64_t>(1, vocab_ * static_cast<int64_t>(sizeof(T) + (narrow_ ? 2 : 0)));
  const int64_t fit = std::max<int64_t>(1, (p_.workspace_mb << 20) / bytes_per_token);
  chunk_ = std::min<int64_t>(fit > 16 ? fit / 16 * 16 : fit, std::min<int64_t>(count_, 1024));
  logits_ = at::empty({chunk_, vocab_}, compute_);
  if (narrow_) rounded_ = at::empty({chunk_, vocab_}, p_.hidden.options());
  if (widen) widened_ = at::empty({std::min(panel_, vocab_), features_}, compute_);

  out_.loss = at::empty({count_}, compute_);
  if (p_.mask[0]) {
    // Tokens that do not count have a zero gradient, and nobody else writes it.
    out_.grad_hidden = count_ == p_.hidden.size(0) ? at::empty_like(p_.hidden, at::MemoryFormat::Contiguous)
                                                   : at::zeros_like(p_.hidden, at::MemoryFormat::Contiguous);
  }
  if (p_.mask[1]) out_.grad_weight = at::zeros({vocab_, features_}, compute_);
  if (p_.mask[2]) out_.grad_bias = at::zeros({vocab_}, compute_);
}

template <class T>
template <class Factor>
void Run<T>::add_chunk(int64_t begin, Factor factor) {
  const int64_t tokens = std::min(chunk_, count_ - begin);
  Tensor index = at::from_blob(const_cast<int64_t*>(p_.rows.data() + begin), {tokens}, at::kLong);
  Tensor gathered = p_.hidden.index_select(0, index);  // (tokens, features)
  Tensor x = gathered.to(compute_);
  Tensor z = logits_.narrow(0, 0, tokens);
  make_logits(x, z);
  Tensor scale = reduce_rows(z, begin, factor);
  if (!gradient_) return;
  if (narrow_) {
    add_rounded_gradients(z, scale, gathered, index);
  } else {
    add_gradients(z, scale, x, index);
  }
}

template <class T>
void Run<T>::make_logits(const Tensor& x, Tensor& z) const {
  for_each_panel([&](int64_t v, int64_t size) {
    Tensor part = z.narrow(1, v, size);
    at::mm_out(part, x, weight_panel(v, size).t());
  });
}

template <class T>
template <class Factor>
Tensor Run<T>::reduce_rows(Tensor& z, int64_t begin, Factor factor) {
  const auto& kernels = cpu::linear_cross_entropy();
  const int64_t tokens = z.size(0);
  Tensor scale = at::empty({tokens, 1}, compute_);
  T* losses = out_.loss.template data_ptr<T>() + begin;
  T* scales = scale.template data_ptr<T>();
  T* rows = z.template data_ptr<T>();
  const T* bias = p_.bias.defined() ? p_.bias.template const_data_ptr<T>() : nullptr;
  const int64_t* target = p_.target.template const_data_ptr<int64_t>();
  at::parallel_for(0, tokens, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const kernels::CrossEntropyRow row{vocab_, target[p_.rows[begin + i]], p_.label_smoothing, p_.softcap, gradient_};
      kernels::CrossEntropyResult r;
      if constexpr (std::is_same_v<T, float>) {
        r = kernels.row_float(rows + i * vocab_, bias, row);
      } else {
        r = kernels.row_double(rows + i * vocab_, bias, row);
      }
      losses[i] = static_cast<T>(r.loss);
      scales[i] = static_cast<T>(r.scale * factor(begin + i));
    }
  });
  return scale;
}

// The gradient of the logits is diag(scale) z, so
//   grad_hidden = diag(scale) (z W),  grad_weight += z^T (diag(scale) x),  grad_bias += z^T scale.
template <class T>
void Run<T>::add_gradients(const Tensor& z, const Tensor& scale, Tensor& x, const Tensor& index) {
  if (p_.mask[0]) {
    Tensor grad = at::empty({z.size(0), features_}, compute_);
    for_each_panel([&](int64_t v, int64_t size) {
      at::addmm_out(grad, grad, z.narrow(1, v, size), weight_panel(v, size), /*beta=*/v == 0 ? 0 : 1, /*alpha=*/1);
    });
    out_.grad_hidden.index_copy_(0, index, grad.mul_(scale).to(p_.hidden.scalar_type()));
  }
  if (p_.mask[1]) out_.grad_weight.addmm_(z.t(), x.mul_(scale));
  if (p_.mask[2]) out_.grad_bias.addmv_(z.t(), scale.squeeze(1));
}

// As in eager PyTorch with fp32 logits: their gradient is rounded to bf16 once, and then multiplied.
template <class T>
void Run<T>::add_rounded_gradients(const Tensor& z, const Tensor& scale, const Tensor& x, const Tensor& index) {
  Tensor grad = rounded_.narrow(0, 0, z.size(0));
  at::mul_out(grad, z, scale);
  if (p_.mask[0]) out_.grad_hidden.index_copy_(0, index, at::mm(grad, p_.weight));
  if (p_.mask[1]) {
    for_each_panel([&](int64_t v, int64_t size) {
      out_.grad_weight.narrow(0, v, size).add_(at::mm(grad.narrow(1, v, size).t(), x));
    });
  }
  if (p_.mask[2]) out_.grad_bias.add_(grad.sum(0, false, compute_.dtype().toScalarType()));
}

template <class Factor>
Result run(const Problem& p, Factor factor) {
  return compute_type(p.hidden) == at::kDouble ? Run<double>(p)(factor) : Run<float>(p)(factor);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& target,
                                                       const OptionalTensor& bias, int64_t ignore_index,
                                                       c10::string_view reduction, double label_smoothing,
                                                       double softcap, int64_t workspace_mb, Mask mask) {
  cross_entropy::check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  Problem p = flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
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
  return std::tuple_cat(std::make_tuple(loss), cross_entropy::gradients(r, hidden));
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_output, const Tensor& hidden, const Tensor& weight,
                                                const Tensor& target, const OptionalTensor& bias, int64_t ignore_index,
                                                c10::string_view reduction, double label_smoothing, double softcap,
                                                int64_t workspace_mb, Mask mask) {
  cross_entropy::check(hidden, weight, target, bias, reduction, label_smoothing, softcap, workspace_mb);
  Problem p = flatten(hidden, weight, target, bias, ignore_index, label_smoothing, softcap, workspace_mb, mask);
  const double share = reduction == "mean" && !p.rows.empty() ? 1.0 / p.rows.size() : 1.0;
  Tensor upstream = grad_output.to(at::kDouble).expand(target.sizes()).reshape({-1}).contiguous();
  const double* u = upstream.const_data_ptr<double>();
  return cross_entropy::gradients(run(p, [&](int64_t i) { return share * u[p.rows[i]]; }), hidden);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("linear_cross_entropy_forward", forward_cpu);
  m.impl("linear_cross_entropy_backward", backward_cpu);
}

}  // namespace
}  // namespace shoestring
