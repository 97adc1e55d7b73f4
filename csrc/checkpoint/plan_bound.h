#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/plan.h"

namespace shoestring::plan {

/// Lower bounds of the whole time, from a state on: what is left to do, with two things made easier. The
/// budget is not a limit, but bytes that blocks hold have a price (Lagrange); and forward is a mean of its
/// two chains, computing and copying out. Backward's waits for copies stay, with the time until they arrive
/// rounded down to a few levels.
class Bound {
 public:
  Bound(const Model& model, int64_t budget);

  /// No plan that goes on from `state`, after `done` blocks, takes less time.
  int64_t operator()(const State& state, size_t done) const;

 private:
  struct Price {
    double held, out;         // picoseconds a byte; the weight of copying out, 0 to 1
    std::vector<float> rest;  // after each number of blocks and for each rounded state: what is left
  };
  Price at(const Model& model, double held, double out) const;
  double value(const Price& price, const State& state, size_t done) const;
  size_t place(const double* lead) const;

  double budget_, level_ = 1;  // picoseconds between levels
  int prefetch_, levels_;
  size_t places_ = 1;
  std::vector<Price> prices_;
};

}  // namespace shoestring::plan
