#include "optim/core/norm.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "core/device.h"
#include "optim/core/foreach_norm.h"

namespace shoestring::optim::detail {

using at::Tensor;

Tensor total_norm(const std::vector<Tensor>& grads, const std::unordered_map<const void*, Tensor>& known) {
  std::vector<std::vector<Tensor>> by_device;
  for (const Tensor& g : grads) {
    const auto same_device = std::find_if(by_device.begin(), by_device.end(),
                                          [&](const auto& same) { return same[0].device() == g.device(); });
    (same_device == by_device.end() ? by_device.emplace_back() : *same_device).push_back(g);
  }
  std::vector<Tensor> norms;
  for (const auto& same : by_device) {
    if (known.empty()) {
      norms.push_back(ops::foreach_norm(same).to(grads[0].device()));
      continue;
    }
    for (const Tensor& g : same) {
      const auto known_norm = g.numel() > 0 ? known.find(g.const_data_ptr()) : known.end();
      norms.push_back(
          (known_norm != known.end() ? known_norm->second : ops::foreach_norm({g})).to(grads[0].device()));
    }
  }
  return at::linalg_vector_norm(at::cat(norms));
}

Tensor clip_coef(const Tensor& norm, double max_norm) {
  return ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1);
}

// The largest magnitude tells. A norm would not do: a sum of squares may overflow although all elements are
// finite.
Tensor non_finite(const std::vector<Tensor>& tensors, at::Device device) {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<Tensor>> lists;
  for (const Tensor& t : tensors) {
    // Empty tensors have no largest element.
    if (t.numel() > 0) lists[{t.device().str(), t.scalar_type()}].push_back(t);
  }
  Tensor any_non_finite = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  for (const auto& [key, same] : lists) {
    std::vector<Tensor> extremes;
    if (is_asynchronous(same[0])) {
      extremes = at::_foreach_norm(same, INFINITY);
    } else {
      // On the CPU, aminmax takes a twentieth of the time of this norm.
      for (const Tensor& t : same) {
        const auto [low, high] = at::aminmax(t);
        extremes.insert(extremes.end(), {low, high});
      }
    }
    const Tensor bad = at::stack(extremes).isfinite().all().logical_not();
    any_non_finite =
        at::maximum(any_non_finite, bad.to(device, at::kFloat, /*non_blocking=*/!device.is_cpu()));
  }
  return any_non_finite;
}

}  // namespace shoestring::optim::detail
