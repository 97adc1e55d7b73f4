#pragma once

// The second moments of Adafactor and CAME: row and column means for a matrix, and all elements for a vector.

#include "optim/composite.h"

namespace shoestring::optim::ops {

// The running means of squares of all parameters of a call.
class Factored {
 public:
  /// Takes the argument names of the means. `full` is null if vectors have no mean.
  Factored(const Call& call, const char* row, const char* col, const char* full);

  /// Moves the means towards `square` by `weight`. Returns the mean for each element, row * col / mean(row),
  /// in the memory of `square`. mean(row) is at least `least`.
  Tensor advance(const Share& s, Tensor square, const Tensor& weight, double least) const;

 private:
  std::vector<Tensor> row_, col_, full_;
};

/// Returns the moment exp_avg, which a call must have if beta1 is above 0, and must not have otherwise.
std::vector<Moment> optional_mean(const Call& call, double beta1);

}  // namespace shoestring::optim::ops
