#pragma once

#include "optim/rule.h"

namespace shoestring::optim::detail {

/// A matrix's second moment, kept as that of its rows and columns, or in full (`full` may be null) that of
/// what has fewer dimensions; what a parameter does not have is empty.
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
