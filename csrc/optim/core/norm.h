#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

/// Returns the norm of all gradients together, as fp32 on the device of the first gradient, without a
/// synchronisation. `grads` must not be empty. `known` maps the address of a gradient's data to the
/// gradient's norm, (1,), if that norm has been computed before.
at::Tensor total_norm(const std::vector<at::Tensor>& grads,
                      const std::unordered_map<const void*, at::Tensor>& known = {});

/// Returns the factor that clips gradients whose norm is `norm`: min(1, max_norm / (norm + 1e-6)), as in
/// torch::nn::utils::clip_grad_norm_.
at::Tensor clip_coef(const at::Tensor& norm, double max_norm);

/// Returns 1 if an element of a tensor is NaN or infinite and 0 otherwise, as fp32 on `device`, without a
/// synchronisation unless `device` is the CPU and a tensor is not there.
at::Tensor non_finite(const std::vector<at::Tensor>& tensors, at::Device device);

}  // namespace shoestring::optim::detail
