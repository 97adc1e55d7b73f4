#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/plan.h"

namespace shoestring::plan {

/// Lower bounds of the total time, given a state. They solve an easier problem for the remaining blocks. The
/// budget is not a limit, but held bytes have a price (Lagrangian relaxation). Forward is a weighted mean of
/// its two chains, computing and copying out. Waits of backward for copies remain, with the time until the
/// copies arrive rounded down to a few levels.
class Bound {
 public:
  Bound(const Model& model, int64_t budget);

  /// Returns a time in picoseconds: no plan that continues from `state` after `done` blocks is faster.
  int64_t operator()(const State& state, size_t done) const;

 private:
  struct Price {
    double held, out;         // picoseconds per byte; the weight of copying out, 0 to 1
    std::vector<float> rest;  // by number of blocks done and rounded state: a bound of the remaining time
  };
  Price at(const Model& model, double held, double out) const;
  double value(const Price& price, const State& state, size_t done) const;
  size_t place(const double* lead) const;

  double budget_, level_ = 1;  // picoseconds between two levels
  int prefetch_, levels_;
  size_t places_ = 1;
  std::vector<Price> prices_;
};

}  // namespace shoestring::plan
