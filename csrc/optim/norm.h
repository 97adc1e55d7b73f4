#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

/// Returns the norm of all gradients together (at least one), fp32 on the device of the first one, without a
/// synchronisation. `known` maps addresses of gradients to their norms, (1,), if these have been computed
/// before.
at::Tensor total_norm(const std::vector<at::Tensor>& grads,
                      const std::unordered_map<const void*, at::Tensor>& known = {});

/// Returns the factor of the gradients, as in torch::nn::utils::clip_grad_norm_.
at::Tensor clip_coef(const at::Tensor& norm, double max_norm);

}  // namespace shoestring::optim::detail
