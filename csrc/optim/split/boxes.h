#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/split/split_params.h"

namespace shoestring::optim::detail {

/// A range of elements of a batch of matrices that is rectangular: the columns [column, column + columns) of
/// the rows [row, row + rows) of the matrices [matrix, matrix + matrices).
struct Box {
  int64_t matrix, matrices, row, rows, column, columns;

  int64_t numel() const { return matrices * rows * columns; }
};

/// Returns the boxes, in order, of which this process's part of a batch of matrices (rows, columns) consists:
/// a part of a row, rows of a matrix, matrices, rows, and a part of a row, of which any may be missing. Each
/// comes with a view (matrices, rows, columns) of its elements in `part`, or in a copy if the part's strides
/// allow no view.
std::vector<std::pair<Box, at::Tensor>> boxes_of(const at::Tensor& part, const SplitParameter& split,
                                                 int64_t rows, int64_t columns);

}  // namespace shoestring::optim::detail
