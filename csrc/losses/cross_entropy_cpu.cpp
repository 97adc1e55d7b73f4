#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/threads.h"
#include "losses/cross_entropy.h"

namespace shoestring::losses {
namespace {

using at::Tensor;

template <class X, class T>
RowsResult cross_entropy_rows_by_type(const CrossEntropyProblem& p, kernels::CrossEntropyLogits<X, T> row) {
  const TargetsOnCpu targets(p.targets());
  // rows_that_count() checks the targets, before any result is written
  const auto rows = p.rows_that_count(targets);
  const OptionalTensor& given = p.options.class_weights();
  const Tensor class_weights = given ? given->to(c10::CppTypeToScalarType<T>::value).contiguous() : Tensor();
  auto rule = rule_of<T>(p, Tensor(), class_weights,
                         class_weights.defined() ? class_weights.sum(at::kDouble).item<double>() : 0);
  const Factor<T> u(p.grad_loss), v(p.grad_lse), h(p.grad_entropy);
  // The kernel skips rows with an ignored target.
  const RowsResult out = p.allocate(/*zeros=*/true);
  const X* from = static_cast<const X*>(p.input.const_data_ptr());
  X* to = p.gradient.defined() ? static_cast<X*>(p.gradient.mutable_data_ptr()) : nullptr;
  T *loss = out.loss.template mutable_data_ptr<T>(), *lse = out.lse.template mutable_data_ptr<T>();
  T* entropy = p.stats ? out.entropy.template mutable_data_ptr<T>() : nullptr;
  int64_t* argmax = p.stats ? out.argmax.template mutable_data_ptr<int64_t>() : nullptr;
  // A class takes about half a nanosecond, mostly for its exponential.
  const int64_t grain = row_grain(16 * rule.vocab);
  at::parallel_for(0, static_cast<int64_t>(rows.size()), grain, [&](int64_t first, int64_t last) {
    std::vector<T> work(to != nullptr && std::is_same_v<X, T> ? 0 : rule.vocab);
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = rows[i];
      X* gradient = to != nullptr ? to + p.gradient_layout(r) : nullptr;
      const kernels::CrossEntropyUpstream upstream{u[r], v[r], h[r]};
      const X* next = i + 1 < last ? from + p.layout(rows[i + 1]) : nullptr;
      const auto result = row(from + p.layout(r), gradient, work.data(), targets[r], rule, upstream, next);
      loss[r] = static_cast<T>(result.loss);
      lse[r] = static_cast<T>(result.lse);
      if (!p.stats) continue;
      entropy[r] = static_cast<T>(result.entropy);
      argmax[r] = result.argmax;
    }
  });
  const int64_t count = p.target.numel();
  if (to == nullptr || static_cast<int64_t>(rows.size()) == count) return out;
  at::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      if (targets[r].part == 0) std::fill_n(to + p.gradient_layout(r), rule.vocab, X{0});
    }
  });
  return out;
}

RowsResult cross_entropy_rows_cpu(CrossEntropyProblem& p) {
  p.place();
  const auto& kernels = cpu::cross_entropy();
  switch (p.input.scalar_type()) {
    case at::kDouble:
      return cross_entropy_rows_by_type(p, kernels.row_double);
    case at::kFloat:
      return cross_entropy_rows_by_type(p, kernels.row_float);
    case at::kBFloat16:
      return cross_entropy_rows_by_type(p, kernels.row_bf16);
    default:
      return cross_entropy_rows_by_type(p, kernels.row_fp16);
  }
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { register_cross_entropy_rows<cross_entropy_rows_cpu>(m); }

}  // namespace
}  // namespace shoestring::losses
