#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "checkpoint/plan.h"

namespace shoestring::plan {

/// Lower bounds of a plan's total time, given a state of the search. Each bound is the solution of an easier
/// problem for the remaining blocks. The budget is not a limit; instead, held bytes have a price (Lagrangian
/// relaxation). The time of forward is a weighted mean of its two chains, computing and copying to the host.
/// Backward still waits for copies, but the time until they arrive is rounded down to a few levels.
class Bound {
 public:
  Bound(const Model& model, int64_t budget);

  /// Returns a lower bound in picoseconds for the total time of all plans that continue from `state`, in
  /// which `done` blocks have been treated.
  int64_t operator()(const State& state, size_t done) const;

 private:
  struct Price {
    // held: price of held memory in picoseconds per byte; out: weight of copying to the host, 0 to 1
    double held, out;
    // lower bounds of the remaining time, indexed by the number of blocks done and the rounded state
    std::vector<float> rest;
  };
  Price at(const Model& model, double held, double out) const;
  double value(const Price& price, const State& state, size_t done) const;
  size_t place(const double* lead) const;

  double budget_, level_ = 1;  // level_: picoseconds between two levels of a rounded time
  int prefetch_, levels_;
  size_t places_ = 1;
  std::vector<Price> prices_;
};

}  // namespace shoestring::plan
