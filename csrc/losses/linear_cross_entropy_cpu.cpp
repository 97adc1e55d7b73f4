#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "losses/linear_cross_entropy.h"
#include "quantization/base_weight.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

// Runs one call of _linear_cross_entropy_rows on the CPU. It processes the tokens that are not ignored, one
// chunk at a time.
template <class T>
class LinearCrossEntropyOnCpu {
 public:
  LinearCrossEntropyOnCpu(const LinearCrossEntropyProblem& problem, const TargetsOnCpu& targets,
                          std::vector<int64_t> rows);

  // weight_type: dtype of the gradient of the weight
  LinearCrossEntropyResult operator()(at::ScalarType weight_type) {
    for (int64_t begin = 0; begin < count_; begin += chunk_) add_chunk(begin);
    const auto narrow = [&](int i, at::ScalarType type) {
      const Tensor wide = gradient(i);
      if (!p_.mask[i] || wide.scalar_type() == type) return;
      gradient(i) = in_huge_pages(at::empty(wide.sizes(), wide.options().dtype(type))).copy_(wide);
    };
    if (!o_.weight_grad()) narrow(kWeight, weight_type);
    if (p_.bias) narrow(kBias, p_.bias->scalar_type());
    if (o_.lora_B()) narrow(kLoraB, o_.lora_B()->scalar_type());
    return out_;
  }

 private:
  void add_chunk(int64_t begin);
  // Computes the logits z (tokens, vocab) = logit_scale * (x (tokens, features) weight^T + lora_hidden
  // lora_B^T), where lora_hidden and lora_B are the LoRA pair.
  void make_logits(const Tensor& x, const Tensor& lora_hidden, Tensor& z) const;
  // Runs the row kernel on the logits z of a chunk, whose first token is number `begin` of the tokens that
  // are not ignored. It writes the losses and statistics to out_. The gradient of the logits is z times the
  // returned scales, (tokens, 1). If narrow_ is set, z itself becomes the complete gradient in bf16.
  Tensor reduce_rows(Tensor& z, int64_t begin);
  static void mark(const T* z, int64_t vocab, double least, uint8_t* live) {
    if constexpr (std::is_same_v<T, float>) {
      cpu::linear_cross_entropy().mark_float(z, vocab, static_cast<float>(least), live);
    } else {
      cpu::linear_cross_entropy().mark_double(z, vocab, least, live);
    }
  }
  void add_live_gradients(const Tensor& z, const Tensor& live, const Tensor& scale, Tensor& x,
                          Tensor& lora_hidden, const Tensor& index);
  void add_gradients(const Tensor& z, const Tensor& scale, const Tensor& x, const Tensor& lora_hidden,
                     const Tensor& index);

  static at::ScalarType type() { return c10::CppTypeToScalarType<T>::value; }
  static Tensor computed(const OptionalTensor& t, double scale) {
    if (!t) return {};
    return scale == 1 ? t->to(type()).contiguous() : t->to(type()).mul(scale);
  }
  // Returns the number of classes whose weights fit into 8 MiB, so that they stay in cache.
  static int64_t panel_of(int64_t features) {
    return std::max<int64_t>(64, (int64_t{8} << 20) / std::max<int64_t>(1, features * sizeof(T)));
  }
  Tensor& gradient(int i) { return out_.gradients[i]; }

  const LinearCrossEntropyProblem& p_;
  const LinearCrossEntropyOptions& o_;
  const at::TensorOptions compute_;
  const std::vector<int64_t> rows_;
  const TargetsOnCpu targets_;
  const double logit_scale_;
  // bias and class weights, contiguous, in the compute dtype (fp32 or fp64)
  const Tensor bias_, class_weights_;
  const Factor<T> grad_loss_, grad_lse_, grad_entropy_;
  const int64_t features_, vocab_, count_;
  const bool gradient_;
  double total_weight_ = 0;            // sum of the class weights
  const Tensor lora_hidden_, lora_B_;  // LoRA pair in the compute dtype (fp32 or fp64), or undefined
  // The weight of the output layer. If the GEMM cannot read it directly, it is converted in panels that stay
  // in cache.
  const quantization::BaseWeight weight_;
  // Whether the gradient of the logits is rounded to bf16 once, as in eager PyTorch with fp32 logits.
  bool narrow_;
  int64_t chunk_;  // number of tokens per chunk
  Tensor logits_;  // logits of a chunk, shape (chunk, vocab)
  // Used with filter_eps, shape (threads, vocab): each thread marks in its row the classes for which the
  // gradient of the chunk's logits is not negligible.
  Tensor live_;
  Tensor grad_weight_;  // the fp32 or fp64 tensor to which the gradient of the weight is added
  // Whether grad_weight_ is still uninitialised, so that the first matrix product must overwrite it instead
  // of adding.
  bool fresh_ = false;
  LinearCrossEntropyResult out_;
};

template <class T>
LinearCrossEntropyOnCpu<T>::LinearCrossEntropyOnCpu(const LinearCrossEntropyProblem& problem,
                                                    const TargetsOnCpu& targets, std::vector<int64_t> rows)
    : p_(problem), o_(p_.options), compute_(p_.input.options().dtype(c10::CppTypeToScalarType<T>::value)),
      rows_(std::move(rows)), targets_(targets), logit_scale_(o_.logit_scale()),
      bias_(computed(p_.bias, logit_scale_)), class_weights_(computed(o_.class_weights(), 1)),
      grad_loss_(p_.grad_loss), grad_lse_(p_.grad_lse), grad_entropy_(p_.grad_entropy),
      features_(p_.input.size(1)), vocab_(p_.classes.expect_int()), count_(rows_.size()),
      gradient_(any(p_.mask)), lora_hidden_(computed(o_.lora_hidden(), 1)), lora_B_(computed(o_.lora_B(), 1)),
      weight_(Head(p_).base(Backend::kCpu, kLinearCrossEntropyOp, type())) {
  // On a CPU with bf16 instructions, the matrix products that compute gradients take bf16 operands. The
  // logits are always fp32.
  narrow_ = gradient_ && !o_.absmax() && p_.input.scalar_type() == at::kBFloat16 &&
            gemm::product_type(p_.input) == at::kBFloat16 && o_.filter_eps() == 0;
  const int64_t given = (o_.workspace_mb() == 0 ? kDefaultWorkspaceMb : o_.workspace_mb()) << 20;
  const int64_t workspace = given - std::min(gemm::gemm_workspace(p_.input.scalar_type()), given / 2);
  const int64_t bytes_per_token = std::max<int64_t>(1, vocab_ * static_cast<int64_t>(sizeof(T)));
  const int64_t fit = std::max<int64_t>(1, workspace / bytes_per_token);
  // Chunks have about equal sizes, because a small last chunk would read all weights for few tokens.
  const int64_t most = std::min<int64_t>(fit > 16 ? fit / 16 * 16 : fit, 1024);
  const int64_t even = gemm::parts_of(count_, std::max<int64_t>(1, gemm::parts_of(count_, most)));
  chunk_ = std::min({most, gemm::parts_of(even, 16) * 16, count_});
  logits_ = in_huge_pages(at::empty({chunk_, vocab_}, compute_));
  if (gradient_ && o_.filter_eps() > 0)
    live_ = at::empty({at::get_num_threads(), vocab_}, compute_.dtype(at::kByte));

  if (class_weights_.defined()) total_weight_ = class_weights_.sum(at::kDouble).template item<double>();
  // The row kernel never visits ignored tokens.
  static_cast<RowsResult&>(out_) = p_.allocate(/*zeros=*/true);
  const auto like = [&](const Tensor& t) {
    return count_ == p_.input.size(0) ? at::empty_like(t, at::MemoryFormat::Contiguous)
                                      : at::zeros_like(t, at::MemoryFormat::Contiguous);
  };
  if (p_.mask[kHidden]) gradient(kHidden) = like(p_.input);
  if (p_.mask[kWeight]) {
    grad_weight_ =
        o_.weight_grad() ? *o_.weight_grad() : in_huge_pages(at::empty({vocab_, features_}, compute_));
    if (!o_.weight_grad()) gradient(kWeight) = grad_weight_;
    fresh_ = !o_.weight_grad() && count_ > 0 && !live_.defined();
    if (!o_.weight_grad() && !fresh_) grad_weight_.zero_();
  }
  if (p_.mask[kBias]) gradient(kBias) = at::zeros({vocab_}, compute_.dtype(at::kDouble));
  if (p_.mask[kLoraHidden]) gradient(kLoraHidden) = like(*o_.lora_hidden());
  if (p_.mask[kLoraB]) gradient(kLoraB) = at::zeros({vocab_, lora_B_.size(1)}, compute_);
}

template <class T>
void LinearCrossEntropyOnCpu<T>::add_chunk(int64_t begin) {
  const int64_t tokens = std::min(chunk_, count_ - begin);
  Tensor index = at::from_blob(const_cast<int64_t*>(rows_.data() + begin), {tokens}, at::kLong);
  Tensor gathered = p_.input.index_select(0, index);  // shape (tokens, features)
  Tensor z = logits_.narrow(0, 0, tokens);
  Tensor lora_hidden = lora_hidden_.defined() ? lora_hidden_.index_select(0, index) : Tensor();
  make_logits(gathered, lora_hidden, z);
  Tensor scale = reduce_rows(z, begin);
  if (!gradient_) return;
  Tensor x = narrow_ ? gathered : gathered.to(compute_);
  const Tensor live = live_.defined() ? live_.amax(0).nonzero().squeeze(1) : Tensor();
  if (live.defined() && live.size(0) < vocab_ / 2) {
    add_live_gradients(z, live, scale, x, lora_hidden, index);
    return;
  }
  const auto scaled = [&](const Tensor& t) { return t.defined() && !narrow_ ? t * scale : t; };
  add_gradients(z, scale, scaled(x), scaled(lora_hidden), index);
}

template <class T>
void LinearCrossEntropyOnCpu<T>::make_logits(const Tensor& x, const Tensor& lora_hidden, Tensor& z) const {
  weight_.for_each_panel([&](int64_t v, const Tensor& panel) {
    gemm::gemm(z.narrow(1, v, panel.size(0)), x, panel.t(), /*beta=*/0, /*alpha=*/logit_scale_);
  });
  if (lora_hidden.defined()) gemm::gemm(z, lora_hidden, lora_B_.t(), /*beta=*/1, /*alpha=*/logit_scale_);
}

template <class T>
Tensor LinearCrossEntropyOnCpu<T>::reduce_rows(Tensor& z, int64_t begin) {
  const auto& kernels = cpu::linear_cross_entropy();
  const int64_t tokens = z.size(0);
  Tensor scale = at::empty({tokens, 1}, compute_);
  auto rule = rule_of<T>(p_, bias_, class_weights_, total_weight_);
  rule.logit_scale = 1;  // the matrix product has applied it
  T *losses = out_.loss.template data_ptr<T>(), *lses = out_.lse.template data_ptr<T>();
  T *scales = scale.template data_ptr<T>(), *rows = z.template data_ptr<T>();
  T* entropies = p_.stats ? out_.entropy.template data_ptr<T>() : nullptr;
  int64_t* classes = p_.stats ? out_.argmax.template data_ptr<int64_t>() : nullptr;
  uint8_t* live = live_.defined() ? live_.zero_().template data_ptr<uint8_t>() : nullptr;
  at::parallel_for(0, tokens, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t token = rows_[begin + i];
      const kernels::CrossEntropyUpstream factors{grad_loss_[token], grad_lse_[token], grad_entropy_[token]};
      const auto* upstream = gradient_ ? &factors : nullptr;
      kernels::CrossEntropyResult r;
      if constexpr (std::is_same_v<T, float>) {
        r = kernels.row_float(rows + i * vocab_, targets_[token], rule, upstream);
      } else {
        r = kernels.row_double(rows + i * vocab_, targets_[token], rule, upstream);
      }
      losses[token] = static_cast<T>(r.loss);
      lses[token] = static_cast<T>(r.lse);
      if (p_.stats) {
        entropies[token] = static_cast<T>(r.entropy);
        classes[token] = r.argmax;
      }
      scales[i] = static_cast<T>(r.scale * logit_scale_);
      if (live_.defined() && r.scale != 0) {
        const double size = std::abs(factors.loss) + std::abs(factors.lse) + std::abs(factors.entropy);
        mark(rows + i * vocab_, vocab_, o_.filter_eps() * size / std::abs(r.scale),
             live + at::get_thread_num() * vocab_);
      }
      if constexpr (std::is_same_v<T, float>) {
        if (narrow_) kernels.round_row(rows + i * vocab_, scales[i], vocab_);
      }
    }
  });
  if (narrow_) z = z.view(at::kBFloat16).narrow(1, 0, vocab_);
  return narrow_ ? scale.fill_(1) : scale;
}

// The gradient of the logits is diag(scale) z, where z is the result of the row kernel and scale has one
// factor per token. W is the weight. The caller has already multiplied x and lora_hidden by scale, so
//   grad_hidden = diag(scale) (z W),  grad_weight += z^T x,  grad_bias += z^T scale.
template <class T>
void LinearCrossEntropyOnCpu<T>::add_gradients(const Tensor& z, const Tensor& scale, const Tensor& x,
                                               const Tensor& lora_hidden, const Tensor& index) {
  const auto put = [&](int i, Tensor& sum) {
    gradient(i).index_copy_(0, index, sum.mul_(scale).to(gradient(i).scalar_type()));
  };
  if (p_.mask[kHidden]) {
    Tensor sum = at::empty({z.size(0), features_}, compute_);
    weight_.for_each_panel([&](int64_t v, const Tensor& panel) {
      gemm::gemm_rounded(sum, z.narrow(1, v, panel.size(0)), panel, /*beta=*/v == 0 ? 0 : 1);
    });
    put(kHidden, sum);
  }
  if (p_.mask[kLoraHidden]) {
    Tensor sum = at::empty({z.size(0), lora_B_.size(1)}, compute_);
    gemm::gemm(sum, z, lora_B_);
    put(kLoraHidden, sum);
  }
  if (p_.mask[kWeight])
    gemm::gemm_rounded(grad_weight_, z.t(), x, /*beta=*/std::exchange(fresh_, false) ? 0 : 1);
  if (p_.mask[kLoraB]) gemm::gemm(gradient(kLoraB), z.t(), lora_hidden, /*beta=*/1);
  // The bias gradient sums 16 tokens at a time in the compute dtype, and adds these sums in fp64.
  for (int64_t i = 0; p_.mask[kBias] && i < z.size(0); i += 16) {
    const int64_t n = std::min<int64_t>(16, z.size(0) - i);
    gradient(kBias).add_(at::mv(z.narrow(0, i, n).t().to(type()), scale.narrow(0, i, n).squeeze(1)));
  }
}

// Computes the same gradients as add_gradients(), but only for the classes whose indices are in `live`.
// Processes the weights of these classes in groups of a few MiB.
template <class T>
void LinearCrossEntropyOnCpu<T>::add_live_gradients(const Tensor& z, const Tensor& live, const Tensor& scale,
                                                    Tensor& x, Tensor& lora_hidden, const Tensor& index) {
  const auto sum = [&](int i, int64_t columns) {
    return p_.mask[i] ? at::zeros({z.size(0), columns}, compute_) : Tensor();
  };
  Tensor grad = sum(kHidden, features_),
         grad_lora_hidden = sum(kLoraHidden, lora_hidden.defined() ? lora_hidden.size(1) : 0);
  x.mul_(scale);
  if (lora_hidden.defined()) lora_hidden.mul_(scale);
  const int64_t step = panel_of(features_);
  for (int64_t begin = 0; begin < live.size(0); begin += step) {
    const Tensor classes = live.narrow(0, begin, std::min(step, live.size(0) - begin));
    const Tensor some = z.index_select(1, classes);  // shape (tokens, classes)
    if (p_.mask[kHidden]) grad.addmm_(some, p_.weight.index_select(0, classes).to(type()));
    if (p_.mask[kLoraHidden]) grad_lora_hidden.addmm_(some, lora_B_.index_select(0, classes));
    if (p_.mask[kWeight]) grad_weight_.index_add_(0, classes, at::mm(some.t(), x));
    if (p_.mask[kBias])
      gradient(kBias).index_add_(0, classes, at::mv(some.t(), scale.squeeze(1)).to(at::kDouble));
    if (p_.mask[kLoraB]) gradient(kLoraB).index_add_(0, classes, at::mm(some.t(), lora_hidden));
  }
  const auto put = [&](int i, const Tensor& t) {
    if (t.defined()) gradient(i).index_copy_(0, index, (t * scale).to(gradient(i).scalar_type()));
  };
  put(kHidden, grad);
  put(kLoraHidden, grad_lora_hidden);
}

LinearCrossEntropyResult linear_cross_entropy_rows_cpu(const LinearCrossEntropyProblem& given) {
  const TargetsOnCpu targets(given.targets());
  std::vector<int64_t> rows = given.rows_that_count(targets);
  const bool away = row_source_of(given.weight) != nullptr;
  if (!away && fits_tiles(given, static_cast<int64_t>(rows.size())))
    return linear_cross_entropy_by_tiles(given, rows);
  const auto type = given.weight.scalar_type();
  LinearCrossEntropyProblem p = given;
  if (!p.options.absmax() && !away) p.weight = p.weight.to(p.input.scalar_type());
  return compute_type(p.input) == at::kDouble
             ? LinearCrossEntropyOnCpu<double>(p, targets, std::move(rows))(type)
             : LinearCrossEntropyOnCpu<float>(p, targets, std::move(rows))(type);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_linear_cross_entropy_rows",
         torch::CppFunction::makeFromBoxedFunction<
             &boxed_rows<LinearCrossEntropyRowsArguments, linear_cross_entropy_rows_cpu>>());
}

}  // namespace
}  // namespace shoestring::losses
