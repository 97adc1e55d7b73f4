// CPU kernels for the rows of linear_cross_entropy. A row of logits is read from memory once. It fits into
// the second-level cache, where the kernel computes the maximum, the exponentials and the gradient. The
// exponentials replace the logits and are not normalised. The missing factor 1 / sum is applied to the
// (tokens, features) operands of the matrix products. This saves a pass over the (tokens, vocab) logits.

#include "losses/linear_cross_entropy_table.h"

#include "losses/cross_entropy_row_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

CrossEntropyResult row_float(float* z, const CrossEntropyTargets<double>& targets,
                             const CrossEntropyRule<float>& rule, const CrossEntropyUpstream* upstream) {
  return reduce_row<Float>(z, z, targets, rule, upstream);
}

CrossEntropyResult row_double(double* z, const CrossEntropyTargets<double>& targets,
                              const CrossEntropyRule<double>& rule, const CrossEntropyUpstream* upstream) {
  return reduce_row(z, targets, rule, upstream);
}

void round_row(float* z, float factor, int64_t vocab) {
  scale_row<BFloat16>(z, factor, vocab, reinterpret_cast<uint16_t*>(z));
}

template <class T>
void mark(const T* __restrict z, int64_t vocab, T least, uint8_t* __restrict live) {
  for (int64_t i = 0; i < vocab; ++i) live[i] |= !((z[i] < 0 ? -z[i] : z[i]) < least);
}

}  // namespace

extern const kernels::LinearCrossEntropyTable linear_cross_entropy;
const kernels::LinearCrossEntropyTable linear_cross_entropy{row_float, row_double, round_row, mark<float>,
                                                            mark<double>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
