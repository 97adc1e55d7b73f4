#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

/// The norm of all gradients together, at least one, fp32 on the first one's device; nothing waits for it.
/// known: norms, (1,), of some of them, by address.
at::Tensor total_norm(const std::vector<at::Tensor>& grads,
                      const std::unordered_map<const void*, at::Tensor>& known = {});

/// What gradients are multiplied by, as torch::nn::utils::clip_grad_norm_ does.
at::Tensor clip_coef(const at::Tensor& norm, double max_norm);

}  // namespace shoestring::optim::detail
