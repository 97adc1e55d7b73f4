#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

/// Reduces a tensor over the processes of a group of c10d, by "sum" or "max". The operators belong to
/// PyTorch's distributed package, which knows the groups by name.
at::Tensor all_reduce(const at::Tensor& tensor, const std::string& how, const std::string& group);

}  // namespace shoestring::optim::detail
