#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

/// Reduces a tensor over the processes of a group of c10d, by "sum" or "max". The operators belong to
/// PyTorch's distributed package, which knows the groups by name.
at::Tensor all_reduce(const at::Tensor& tensor, const std::string& how, const std::string& group);

/// Sends `sent[r]` elements of a flat tensor to each rank r of a group, in order, and returns the
/// `received[r]` elements from each.
at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& received,
                      const std::vector<int64_t>& sent, const std::string& group);

}  // namespace shoestring::optim::detail
