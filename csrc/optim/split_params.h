#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <shoestring/export.h>

namespace shoestring::optim {

/// What optimizers know of a tensor that is one process's part of a parameter.
struct SplitParameter {
  std::vector<std::string> groups;  ///< process groups over whose ranks the parameter is split
  int64_t piece = 0;                ///< the index of the part among all of the parameter
  int64_t numel = 0;                ///< elements of the whole parameter
};

/// Lets the optimizers of this library treat a tensor as a part of a parameter, as long as the tensor exists.
SHOESTRING_API void set_split(const at::Tensor& part, SplitParameter of);

/// Returns what set_split() has said of a tensor, or null.
const SplitParameter* split_of(const at::Tensor& tensor);

}  // namespace shoestring::optim
