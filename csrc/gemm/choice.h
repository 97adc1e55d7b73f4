#pragma once

// The rule by which dense layers are computed by this package or by PyTorch.

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "core/capability.h"

namespace shoestring::gemm {

/// A group of layers that read the same input.
struct LayerGroup {
  at::ScalarType compute, dtype;  // dtypes of the products and of the weights
  int64_t in_features;
  std::vector<int64_t> out_features;

  int64_t weights() const {
    int64_t sum = 0;
    for (const int64_t out : out_features) sum += out * in_features;
    return sum;
  }
  bool operator<(const LayerGroup& other) const {
    return std::tie(compute, dtype, in_features, out_features) <
           std::tie(other.compute, other.dtype, other.in_features, other.out_features);
  }
};

/// Groups with fewer weights are left to PyTorch where a measurement decides: their products take
/// microseconds.
constexpr int64_t kLeastWeights = int64_t{1} << 16;

/// Returns whether this package computes the group. `measure` returns the time of its products over the time
/// of PyTorch's; it is called only if the kind of CPU does not decide.
///
/// With AMX, products in bf16 are ours: whole training steps were measured faster. In fp32 on CPUs of AMD
/// they are ours as well, because MKL reaches 0.4 to 0.9 of our rate there; a measurement of small groups
/// comes near 1, and two processes would then choose differently. Elsewhere, ours must be clearly faster: the
/// limit lies far from the usual ratio, so that all processes on one machine choose alike.
template <class Measure>
bool chooses_own(cpu::Capability capability, bool amd, const LayerGroup& group, Measure measure) {
  if (capability == cpu::Capability::kAmx) return group.compute == at::kBFloat16;
  const bool supported = group.compute == at::kFloat || group.compute == at::kBFloat16;
  if (capability == cpu::Capability::kPlain || !supported || group.weights() < kLeastWeights) return false;
  return (amd && group.compute == at::kFloat) || measure() <= 0.75;
}

/// A choice, and the time that its measurement took in this call: 0 if nothing was measured.
struct Choice {
  bool own;
  double seconds;
};

/// Returns the choice for a group on this CPU. A group is measured once in a process, for each capability and
/// number of threads.
Choice choose(const LayerGroup& group);

}  // namespace shoestring::gemm
