// CPU kernels for the rows of cross_entropy, which are bound by memory bandwidth. Each row of logits is read
// from memory once, and its gradient is written once. The steps in between run in cache, in fp32. If the
// gradient is fp32, its own memory holds the intermediate values; otherwise each thread has a buffer of one
// row for them.

#include "losses/cross_entropy_row_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

template <class Element>
CrossEntropyResult row(const typename Element::Type* logits, typename Element::Type* gradient, float* work,
                       const CrossEntropyTargets<double>& targets, const CrossEntropyRule<float>& rule,
                       const CrossEntropyUpstream& upstream, const typename Element::Type* next) {
  float* z = work;
  if constexpr (sizeof(typename Element::Type) == sizeof(float)) {
    if (gradient != nullptr) z = gradient;
  }
  const CrossEntropyResult result =
      reduce_row<Element>(logits, z, targets, rule, gradient != nullptr ? &upstream : nullptr, next);
  if (gradient != nullptr) {
    scale_row<Element>(z, static_cast<float>(result.scale * rule.logit_scale), rule.vocab, gradient);
  }
  return result;
}

CrossEntropyResult row_double(const double* logits, double* gradient, double* work,
                              const CrossEntropyTargets<double>& targets,
                              const CrossEntropyRule<double>& rule, const CrossEntropyUpstream& upstream,
                              const double*) {
  double* z = gradient != nullptr ? gradient : work;
  for (int64_t i = 0; i < rule.vocab; ++i) z[i] = logits[i];
  const CrossEntropyResult result = reduce_row(z, targets, rule, gradient != nullptr ? &upstream : nullptr);
  for (int64_t i = 0; gradient != nullptr && i < rule.vocab; ++i)
    gradient[i] *= result.scale * rule.logit_scale;
  return result;
}

}  // namespace

extern const kernels::CrossEntropyTable cross_entropy;
const kernels::CrossEntropyTable cross_entropy{row<Float>, row<BFloat16>, row<Half>, row_double};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
