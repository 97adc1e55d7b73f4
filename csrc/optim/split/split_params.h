#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>

namespace shoestring::optim {

/// The place of a tensor in the parameter of which it is one process's part, as optimizers know it.
struct SplitParameter {
  std::vector<std::string> groups;  ///< process groups over whose ranks the parameter is split; at least one
  int64_t piece = 0;                ///< the index of the part among all of the parameter
  std::vector<int64_t> sizes;       ///< shape of the whole parameter
  /// If the parameter is split over one group into ranges of its elements: where the part of each rank
  /// begins, and the number of all elements. Otherwise empty.
  std::vector<int64_t> begins;
  at::DeviceType device = at::kCPU;  ///< on which the groups communicate
  bool is_replica = false;           ///< whether another process has the same part and writes files

  int64_t numel() const;
  /// If the parts are ranges: the elements [begin(), end()) that this process has.
  int64_t begin() const { return begins[static_cast<size_t>(piece)]; }
  int64_t end() const { return begins[static_cast<size_t>(piece) + 1]; }
};

/// How processes split a tensor, such as a moment of a split parameter: each has a range of its elements.
struct SplitTensor {
  SplitParameter of;
  std::vector<int64_t> begins;  ///< where the part of each rank begins, and the number of all elements
  std::vector<int64_t> sizes;   ///< shape of the whole tensor

  int64_t begin() const { return begins[static_cast<size_t>(of.piece)]; }
  int64_t end() const { return begins[static_cast<size_t>(of.piece) + 1]; }
};

/// Lets the optimizers of this library treat a tensor as a part of a parameter, as long as the tensor exists.
SHOESTRING_API void set_split(const at::Tensor& part, SplitParameter of);

/// Calls set_split() for each tensor that process groups split, from the members of SplitParameter of all
/// tensors. The lists are empty if no tensor is a part.
void set_splits(const std::vector<at::Tensor>& parts, const std::vector<std::vector<std::string>>& groups,
                const std::vector<int64_t>& pieces, const std::vector<std::vector<int64_t>>& sizes,
                const std::vector<std::vector<int64_t>>& begins, at::DeviceType device);

/// Returns what set_split() has said of a tensor, or null.
const SplitParameter* split_of(const at::Tensor& tensor);

/// Returns the shape of a tensor, or of the parameter of which it is a part.
at::IntArrayRef whole_sizes(const at::Tensor& tensor);

/// Says which part of a parameter this process has, and whether it has the part alone, since the parameter
/// has no memory.
SHOESTRING_API void set_part(const at::Tensor& whole, const at::Tensor& part, bool is_alone);

/// Returns the part of a parameter without memory, or an undefined tensor.
at::Tensor part_of(const at::Tensor& whole);

/// Returns whether a tensor is this process's part of a parameter, which may have its memory.
bool is_part_of(const at::Tensor& part, const at::Tensor& whole);

}  // namespace shoestring::optim
