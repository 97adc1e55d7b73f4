#include "checkpoint/plan_bound.h"

// Computes lower bounds of the time of a checkpoint plan, by Lagrangian relaxation of the memory budget.

#include <cmath>
#include <limits>
#include <utility>

namespace shoestring::plan {
namespace {

// Number of values (levels) to which times are rounded, for a prefetch of 1, 2, 3 and 4 blocks. A table of
// bounds has levels ^ prefetch entries for each block.
constexpr int kLevels[kMaxPrefetch] = {64, 16, 8, 6};

}  // namespace

// Returns the index of a state in the table of bounds, after rounding the state's times. lead[j] is the time
// in picoseconds from the start of a copy back to the start of the last block's backward. The copy is that of
// the block j places before the last block.
size_t Bound::place(const double* lead) const {
  size_t index = 0;
  for (int j = 0; j < prefetch_; ++j) {
    index = index * levels_ + static_cast<size_t>(std::min(lead[j] / level_, levels_ - 1.0));
  }
  return index;
}

Bound::Price Bound::at(const Model& model, double held, double out) const {
  const size_t n = model.blocks.size();
  // Conversion to float must also round down, since the table holds lower bounds.
  const auto down = [](double x) {
    return std::nextafter(static_cast<float>(x), -std::numeric_limits<float>::infinity());
  };
  Price price{held, out, std::vector<float>((n + 1) * places_)};
  for (size_t p = 0; p < places_; ++p) {
    size_t first = p;
    for (int j = 1; j < prefetch_; ++j) first /= levels_;
    price.rest[n * places_ + p] = down(first * level_);
  }
  for (size_t i = n; i-- > 0;) {
    const Block& block = model.blocks[i];
    for (size_t p = 0; p < places_; ++p) {
      double lead[kMaxPrefetch], next[kMaxPrefetch];
      for (size_t j = prefetch_, digits = p; j-- > 0; digits /= levels_)
        lead[j] = (digits % levels_) * level_;
      double least = std::numeric_limits<double>::infinity();
      for (const Choice& c : block.choices) {
        const double took = std::max(double(block.backward + c.extra), lead[prefetch_ - 1]);
        next[0] = c.in + std::max(0.0, lead[0] - took);
        for (int j = 1; j < prefetch_; ++j) next[j] = std::max(0.0, lead[j - 1] - took);
        // After the last block no bytes need to be held, but the peaks of the last block itself have to fit
        // into the budget.
        const double memory = i + 1 == n ? std::max(c.forward, c.backward) : c.held;
        least = std::min(least, (1 - out) * (block.forward + c.slower) + out * c.out + took + held * memory +
                                    price.rest[(i + 1) * places_ + place(next)]);
      }
      price.rest[i * places_ + p] = down(least);
    }
  }
  return price;
}

double Bound::value(const Price& price, const State& s, size_t done) const {
  double lead[kMaxPrefetch];
  for (int j = 0; j < prefetch_; ++j) lead[j] = double(s.arrival[j] - s.rest);
  return (1 - price.out) * s.compute + price.out * s.out + s.rest + price.held * (s.held - budget_) +
         price.rest[done * places_ + place(lead)];
}

Bound::Bound(const Model& model, int64_t budget)
    : budget_(static_cast<double>(budget)), prefetch_(model.prefetch), levels_(kLevels[model.prefetch - 1]) {
  double time = 1, bytes = 1, longest = 0;
  for (const Block& block : model.blocks) {
    for (const Choice& choice : block.choices) {
      time = std::max(time, double(block.forward + choice.slower + block.backward + choice.extra +
                                   choice.out + choice.in));
      bytes = std::max(bytes, double(choice.held + choice.link));
      longest = std::max(longest, double(choice.in));
    }
  }
  // The levels cover the times that place() rounds, from 0 to twice the time of the longest copy to the
  // device. A copy that waits for another copy ends later than the longest copy alone would. The last level
  // stands for all longer times.
  level_ = std::max(1.0, 2 * longest / levels_);
  for (int j = 0; j < prefetch_; ++j) places_ *= levels_;
  const State start;
  for (const double out : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    // The price of memory is the Lagrange multiplier of the memory budget. A ternary search finds the price
    // that gives the best bound before the first block. The bound is concave in the price.
    double low = 0, high = 16 * time / bytes;
    for (int i = 0; i < 16; ++i) {
      const double a = low + (high - low) / 3, b = high - (high - low) / 3;
      if (value(at(model, a, out), start, 0) < value(at(model, b, out), start, 0)) {
        low = a;
      } else {
        high = b;
      }
    }
    // After some blocks, another price of memory may give a better bound, so bounds are computed for several
    // prices.
    for (const double factor : {0.0, 0.6, 0.8, 1.0, 1.25, 1.6})
      prices_.push_back(at(model, factor * (low + high) / 2, out));
  }
}

int64_t Bound::operator()(const State& s, size_t done) const {
  double most = 0;
  for (const Price& price : prices_) most = std::max(most, value(price, s, done));
  // Subtract more than rounding errors may have added, so that the result is a lower bound.
  return static_cast<int64_t>(most * (1 - 1e-6)) - 1;
}

}  // namespace shoestring::plan
