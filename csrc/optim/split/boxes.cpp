#include "optim/split/boxes.h"

#include <algorithm>

namespace shoestring::optim::detail {
namespace {

std::vector<Box> boxes(int64_t begin, int64_t end, int64_t rows, int64_t columns) {
  std::vector<Box> result;
  while (begin < end) {
    const int64_t left = end - begin, matrix = begin / (rows * columns);
    const int64_t row = begin / columns % rows, column = begin % columns;
    if (column > 0 || left < columns) {
      result.push_back({matrix, 1, row, 1, column, std::min(left, columns - column)});
    } else if (row > 0 || left < rows * columns) {
      result.push_back({matrix, 1, row, std::min(left / columns, rows - row), 0, columns});
    } else {
      result.push_back({matrix, left / (rows * columns), 0, rows, 0, columns});
    }
    begin += result.back().numel();
  }
  return result;
}

}  // namespace

std::vector<std::pair<Box, at::Tensor>> boxes_of(const at::Tensor& part, const SplitParameter& split,
                                                 int64_t rows, int64_t columns) {
  std::vector<std::pair<Box, at::Tensor>> result;
  const at::Tensor flat = part.reshape({-1});
  int64_t begin = 0;
  for (const Box& box : boxes(split.begin(), split.end(), rows, columns)) {
    result.emplace_back(box, flat.narrow(0, begin, box.numel()).view({box.matrices, box.rows, box.columns}));
    begin += box.numel();
  }
  return result;
}

}  // namespace shoestring::optim::detail
