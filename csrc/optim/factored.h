#pragma once

// The second moments of Adafactor and CAME. A matrix has a mean of squares per row and per column, a vector
// has a mean per element.

#include "optim/composite.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {

// The running means of squares (of gradients or updates) of all parameters of an operator call.
class Factored {
 public:
  /// row, col and full: names of the operator arguments with the means of rows, of columns, and of a vector's
  /// elements. `full` is null if vectors have no mean.
  Factored(const Call& call, const char* row, const char* col, const char* full);

  /// Updates the stored means with the new squares `square`: mean += weight * (new - mean). Then overwrites
  /// `square` with the mean of each element, and returns it. For a matrix, the mean of an element is row *
  /// col / mean(row), where mean(row) is raised to at least `least`.
  Tensor advance(const Share& s, Tensor square, const Tensor& weight, double least) const;

 private:
  std::vector<Tensor> row_, col_, full_;
};

/// Returns the moment exp_avg if beta1 is above 0, and an empty list if beta1 is 0. Raises if exp_avg is
/// missing although beta1 is above 0, or given although beta1 is 0.
std::vector<Moment> optional_mean(const Call& call, double beta1);

}  // namespace shoestring::optim::ops

namespace shoestring::optim::detail {

/// Returns names and shapes of the tensors that hold a parameter's second moment. A parameter with two or
/// more dimensions has `row` and `col`, the means of its rows and columns. Other parameters have `full`,
/// unless `full` is null. Tensors that a parameter does not have are empty.
std::vector<Extra> factored(const Tensor& param, const char* row, const char* col, const char* full);

}  // namespace shoestring::optim::detail
