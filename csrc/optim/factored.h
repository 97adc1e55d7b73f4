#pragma once

// The second moments of Adafactor and CAME. A matrix has a mean of squares per row and per column, a vector
// has a mean per element.

#include "optim/composite.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {

// The running means of squares (of gradients or updates) of all parameters of an operator call.
class Factored {
 public:
  /// `first`: index of the means of rows in the extra tensors of the optimizer. The means of columns follow
  /// and, where vectors have a mean, the means of their elements.
  Factored(const Call& call, size_t first);

  /// Updates the stored means with the new squares `square`: mean += weight * (new - mean). Then overwrites
  /// `square` with the mean of each element, and returns it. For a matrix, the mean of an element is row *
  /// col / mean(row), where mean(row) is raised to at least `least`.
  Tensor advance(const Share& s, Tensor square, const Tensor& weight, double least) const;

 private:
  const std::vector<Tensor>* means_;  // of rows, of columns, and of elements
};

}  // namespace shoestring::optim::ops

namespace shoestring::optim::detail {

/// Returns names and shapes of the tensors that hold a parameter's second moment. A parameter with two or
/// more dimensions has `row` and `col`, the means of its rows and columns. Other parameters have `full`,
/// unless `full` is null. Tensors that a parameter does not have are empty.
std::vector<Extra> factored(const char* row, const char* col, const char* full);

}  // namespace shoestring::optim::detail
