#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/split/split_params.h"

namespace shoestring::optim::detail {

/// Reduces a tensor over the processes of a group of c10d, by "sum" or "max". The operators belong to
/// PyTorch's distributed package, which knows the groups by name.
at::Tensor all_reduce(const at::Tensor& tensor, const std::string& how, const std::string& group);

/// Sends `sent[r]` elements of a flat tensor to each rank r of a group, in order, and returns the
/// `received[r]` elements from each.
at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& received,
                      const std::vector<int64_t>& sent, const std::string& group);

/// The results that a process has computed from its part of a parameter: tensors that are sums over elements,
/// and Euclidean norms.
struct Partial {
  std::vector<at::Tensor> sums{}, norms{};
};

/// Replaces what the processes have of their parts by what it is of whole parameters, which are all split
/// like `split`, with one all-reduce.
void combine(const std::vector<Partial>& parts, const SplitParameter& split);

/// Items that belong to split parameters, by the groups over which the parameters are split.
template <class T>
class ByGroups : public std::vector<std::pair<const SplitParameter*, std::vector<T>>> {
 public:
  void add(const SplitParameter& split, T item) {
    auto same = std::find_if(this->begin(), this->end(),
                             [&](const auto& entry) { return entry.first->groups == split.groups; });
    if (same == this->end()) same = this->insert(this->end(), {&split, {}});
    same->second.push_back(std::move(item));
  }
};

}  // namespace shoestring::optim::detail
