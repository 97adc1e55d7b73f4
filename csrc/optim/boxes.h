#pragma once

#include <cstdint>
#include <vector>

namespace shoestring::optim::detail {

/// A range of elements of a batch of matrices that is rectangular: the columns [column, column + columns) of
/// the rows [row, row + rows) of the matrices [matrix, matrix + matrices).
struct Box {
  int64_t matrix, matrices, row, rows, column, columns;

  int64_t numel() const { return matrices * rows * columns; }
};

/// Returns the boxes, in order, of which the elements [begin, end) of a batch of matrices consist: a part of
/// a row, rows of a matrix, matrices, rows, and a part of a row, of which any may be missing.
std::vector<Box> boxes(int64_t begin, int64_t end, int64_t rows, int64_t columns);

}  // namespace shoestring::optim::detail
