#pragma once

#include "optim/rule.h"

namespace shoestring::optim::detail {

/// Returns the second moment's tensors of a parameter. A parameter with two or more dimensions has the row
/// and column means. Other parameters have `full`, unless that is null. The remaining tensors are empty.
inline std::vector<Extra> factored(const Tensor& param, const char* row, const char* col, const char* full) {
  const std::vector<int64_t> shape = param.sizes().vec(), none{0};
  std::vector<Extra> all{{row, none}, {col, none}};
  if (shape.size() > 1) {
    all[0].shape = all[1].shape = shape;
    all[0].shape.end()[-1] = all[1].shape.end()[-2] = 1;
  }
  if (full != nullptr) all.push_back({full, shape.size() > 1 ? none : shape});
  return all;
}

}  // namespace shoestring::optim::detail
