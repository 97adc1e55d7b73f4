#include "optim/norm.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/foreach_norm.h"

namespace shoestring::optim::detail {

using at::Tensor;

Tensor total_norm(const std::vector<Tensor>& grads, const std::unordered_map<const void*, Tensor>& known) {
  std::vector<std::vector<Tensor>> by_device;
  for (const Tensor& g : grads) {
    const auto found = std::find_if(by_device.begin(), by_device.end(),
                                    [&](const auto& same) { return same[0].device() == g.device(); });
    (found == by_device.end() ? by_device.emplace_back() : *found).push_back(g);
  }
  std::vector<Tensor> norms;
  for (const auto& same : by_device) {
    if (known.empty()) {
      norms.push_back(ops::foreach_norm(same).to(grads[0].device()));
      continue;
    }
    for (const Tensor& g : same) {
      const auto found = g.numel() > 0 ? known.find(g.const_data_ptr()) : known.end();
      norms.push_back((found != known.end() ? found->second : ops::foreach_norm({g})).to(grads[0].device()));
    }
  }
  return at::linalg_vector_norm(at::cat(norms));
}

Tensor clip_coef(const Tensor& norm, double max_norm) {
  return ((norm + 1e-6).reciprocal() * max_norm).clamp_max(1);
}

}  // namespace shoestring::optim::detail
