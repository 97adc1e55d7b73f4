#pragma once

// The second moments of Adafactor and CAME. A matrix has a mean of squares per row and per column, a vector
// has a mean per element. Of a parameter that processes have split, each of them has the means of all rows
// and columns, and those of its own elements of a vector.

#include "optim/rule.h"
#include "optim/rules/composite.h"

namespace shoestring::optim::ops {

/// New squares of a parameter: sums over its rows and columns, or the elements of a vector.
struct Squares {
  Tensor row{}, col{}, full{};

  /// Returns what is added up over the processes that have split the parameter.
  std::vector<Tensor> sums() const {
    return row.defined() ? std::vector<Tensor>{row, col} : std::vector<Tensor>();
  }
};

// The running means of squares (of gradients or updates) of all parameters of an operator call.
class Factored {
 public:
  /// `first`: index of the means of rows in the extra tensors of the optimizer. The means of columns follow
  /// and, where vectors have a mean, the means of their elements.
  Factored(const Call& call, size_t first);

  /// Returns the sums of `square`, which has the elements of the parameter that this process has. Only they
  /// count in the sums.
  Squares fresh(const Share& s, const Tensor& square) const;

  /// Updates the stored means with new squares, those of the whole parameter: mean += weight * (new - mean).
  /// Returns the mean of each element. For a matrix it is row * col / mean(row), where mean(row) is raised to
  /// at least `least`.
  Tensor advance(const Share& s, const Squares& fresh, const Tensor& weight, double least) const;

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
