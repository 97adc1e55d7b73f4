#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/huge_pages.h"
#include "gemm/gemm.h"
#include "losses/linear_distillation.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

// Runs one call of _linear_distillation_rows on the CPU. It processes the tokens that are not ignored, one
// chunk at a time.
template <class T>
class DistillationOnCpu {
 public:
  explicit DistillationOnCpu(const DistillationProblem& problem);
  DistillationResult operator()();

 private:
  void add_chunk(int64_t begin);
  // Computes the logits z (tokens, vocab) = x (tokens, features) weight^T / temperature.
  void make_logits(const Tensor& x, const quantization::BaseWeight& weight, const Tensor& z) const {
    weight.for_each_panel([&](int64_t v, const Tensor& panel) {
      gemm::gemm(z.narrow(1, v, panel.size(0)), x, panel.t(), /*beta=*/0,
                 /*alpha=*/1 / p_.options.temperature());
    });
  }
  // Runs the row kernel on a chunk: z holds the student's logits, `teacher` the teacher's. The chunk begins
  // at number `begin` of the tokens that are not ignored. The kernel writes the losses to out_. If gradients
  // are requested, z becomes the gradient of the student's logits before their division by the temperature.
  void reduce_rows(const Tensor& z, const Tensor& teacher, int64_t begin);
  void add_gradients(const Tensor& z, const Tensor& x, const Tensor& lora_hidden, const Tensor& index);

  static at::ScalarType type() { return c10::CppTypeToScalarType<T>::value; }
  // Returns the rows of t whose numbers are in `index`, converted to the compute dtype (fp32 or fp64).
  static Tensor rows_of(const Tensor& t, const Tensor& index) { return t.index_select(0, index).to(type()); }
  Tensor divided(const OptionalTensor& bias) const {
    return bias ? bias->to(type()).div(p_.options.temperature()).contiguous() : Tensor();
  }

  const DistillationProblem& p_;
  const at::TensorOptions compute_;
  const std::vector<int64_t> rows_;
  // bias in the compute dtype, divided by the temperature; undefined without a bias
  const Tensor bias_, teacher_bias_;
  const Tensor lora_B_;  // LoRA factor (vocab, rank) in the compute dtype; undefined without LoRA
  // The weights of student and teacher. If the GEMM cannot read a weight directly, it is converted in panels
  // that stay in cache.
  const quantization::BaseWeight weight_, teacher_weight_;
  const Factor<T> grad_loss_;
  const int64_t vocab_, count_;
  int64_t chunk_;            // number of tokens per chunk
  Tensor logits_, teacher_;  // a chunk's logits of student and teacher, shape (chunk, vocab)
  DistillationResult out_;
};

template <class T>
DistillationOnCpu<T>::DistillationOnCpu(const DistillationProblem& problem)
    : p_(problem), compute_(p_.input.options().dtype(type())),
      rows_(
          rows_that_count(kDistillationOp, p_.input.size(0), p_.options.target(), p_.options.ignore_index())),
      bias_(divided(p_.bias)), teacher_bias_(divided(p_.teacher_bias)),
      lora_B_(p_.options.lora_B() ? p_.options.lora_B()->to(type()) : Tensor()),
      weight_(Head(p_).base(Backend::kCpu, kDistillationOp, type())),
      teacher_weight_(p_.teacher().base(Backend::kCpu, kDistillationOp, type())), grad_loss_(p_.grad_loss),
      vocab_(p_.vocab.expect_int()), count_(rows_.size()) {
  const int64_t workspace = p_.options.workspace_mb() == 0 ? kDefaultWorkspaceMb : p_.options.workspace_mb();
  const int64_t bytes_per_token = std::max<int64_t>(1, 2 * vocab_ * static_cast<int64_t>(sizeof(T)));
  const int64_t fit = std::max<int64_t>(1, (workspace << 20) / bytes_per_token);
  chunk_ = std::min<int64_t>(fit > 16 ? fit / 16 * 16 : fit, std::min<int64_t>(count_, 1024));
  logits_ = in_huge_pages(at::empty({chunk_, vocab_}, compute_));
  teacher_ = in_huge_pages(at::empty({chunk_, vocab_}, compute_));

  // The row kernel never visits ignored tokens, so their results must start at zero.
  out_.loss = at::zeros({p_.input.size(0)}, compute_);
  if (p_.mask[kHidden]) out_.gradients[kHidden] = at::zeros(p_.input.sizes(), p_.input.options());
  if (p_.mask[kWeight]) out_.gradients[kWeight] = at::zeros(p_.weight.sizes(), compute_);
  if (p_.mask[kBias]) out_.gradients[kBias] = at::zeros({vocab_}, compute_);
  if (p_.mask[kLoraHidden])
    out_.gradients[kLoraHidden] =
        at::zeros(p_.options.lora_hidden()->sizes(), p_.options.lora_hidden()->options());
  if (p_.mask[kLoraB]) out_.gradients[kLoraB] = at::zeros(lora_B_.sizes(), compute_);
}

template <class T>
DistillationResult DistillationOnCpu<T>::operator()() {
  for (int64_t begin = 0; begin < count_; begin += chunk_) add_chunk(begin);
  const auto round_to = [&](int i, const OptionalTensor& like) {
    if (p_.mask[i]) out_.gradients[i] = out_.gradients[i].to(like->scalar_type());
  };
  round_to(kWeight, p_.weight);
  round_to(kBias, p_.bias);
  round_to(kLoraB, p_.options.lora_B());
  return out_;
}

template <class T>
void DistillationOnCpu<T>::add_chunk(int64_t begin) {
  const int64_t tokens = std::min(chunk_, count_ - begin);
  const Tensor index = at::from_blob(const_cast<int64_t*>(rows_.data() + begin), {tokens}, at::kLong);
  const Tensor z = logits_.narrow(0, 0, tokens), teacher = teacher_.narrow(0, 0, tokens);
  const Tensor x = rows_of(p_.input, index),
               lora_hidden = p_.options.lora_hidden() ? rows_of(*p_.options.lora_hidden(), index) : Tensor();
  make_logits(x, weight_, z);
  if (lora_hidden.defined())
    gemm::gemm(z, lora_hidden, lora_B_.t(), /*beta=*/1, /*alpha=*/1 / p_.options.temperature());
  make_logits(rows_of(p_.teacher_hidden, index), teacher_weight_, teacher);
  reduce_rows(z, teacher, begin);
  if (p_.wants_gradient()) add_gradients(z, x, lora_hidden, index);
}

template <class T>
void DistillationOnCpu<T>::reduce_rows(const Tensor& z, const Tensor& teacher, int64_t begin) {
  const auto& kernels = cpu::linear_distillation();
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.template const_data_ptr<T>() : nullptr; };
  const kernels::DistillationRule<T> rule{vocab_, pointer(bias_), pointer(teacher_bias_), p_.divergence,
                                          p_.options.beta()};
  T *losses = out_.loss.template data_ptr<T>(), *students = z.template data_ptr<T>();
  T* teachers = teacher.template data_ptr<T>();
  at::parallel_for(0, z.size(0), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t token = rows_[begin + i];
      const double factor = grad_loss_[token] / p_.options.temperature();
      const double* upstream = p_.wants_gradient() ? &factor : nullptr;
      double loss;
      if constexpr (std::is_same_v<T, float>) {
        loss = kernels.row_float(students + i * vocab_, teachers + i * vocab_, rule, upstream);
      } else {
        loss = kernels.row_double(students + i * vocab_, teachers + i * vocab_, rule, upstream);
      }
      losses[token] = static_cast<T>(loss);
    }
  });
}

template <class T>
void DistillationOnCpu<T>::add_gradients(const Tensor& z, const Tensor& x, const Tensor& lora_hidden,
                                         const Tensor& index) {
  if (p_.mask[kHidden]) {
    Tensor grad = at::empty({z.size(0), p_.input.size(1)}, compute_);
    weight_.for_each_panel([&](int64_t v, const Tensor& panel) {
      gemm::gemm(grad, z.narrow(1, v, panel.size(0)), panel, /*beta=*/v == 0 ? 0 : 1);
    });
    out_.gradients[kHidden].index_copy_(0, index, grad.to(p_.input.scalar_type()));
  }
  if (p_.mask[kWeight]) gemm::gemm(out_.gradients[kWeight], z.t(), x, /*beta=*/1);
  if (p_.mask[kBias]) out_.gradients[kBias].add_(z.sum(0));
  if (p_.mask[kLoraHidden])
    out_.gradients[kLoraHidden].index_copy_(0, index,
                                            at::mm(z, lora_B_).to(p_.options.lora_hidden()->scalar_type()));
  if (p_.mask[kLoraB]) gemm::gemm(out_.gradients[kLoraB], z.t(), lora_hidden, /*beta=*/1);
}

DistillationResult distillation_rows_cpu(const DistillationProblem& p) {
  return compute_type(p.input) == at::kDouble ? DistillationOnCpu<double>(p)()
                                              : DistillationOnCpu<float>(p)();
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_linear_distillation_rows", torch::CppFunction::makeFromBoxedFunction<
                                          &boxed_rows<DistillationRowsArguments, distillation_rows_cpu>>());
}

}  // namespace
}  // namespace shoestring::losses
