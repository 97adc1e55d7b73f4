#pragma once

// Running means of squares: a matrix's as those of its rows and columns, a vector's in full.

#include "optim/composite.h"

namespace shoestring::optim::ops {

class Factored {
 public:
  /// The names of a call's tensors; `full` is null where vectors have none.
  Factored(const Call& call, const char* row, const char* col, const char* full);

  /// Advances the means by `weight` of `square`, whose memory it takes, and returns the mean as it stands for
  /// each element: row col / mean(row), with mean(row) at least `least`.
  Tensor advance(const Share& s, Tensor square, const Tensor& weight, double least) const;

 private:
  std::vector<Tensor> row_, col_, full_;
};

/// exp_avg, which a call has where beta1 is above 0, and only there.
std::vector<Moment> optional_mean(const Call& call, double beta1);

}  // namespace shoestring::optim::ops
