#pragma once

// The arguments and results of the operators mixup and cutmix.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <shoestring/data/data.h>

namespace shoestring::data {

struct MixCall {
  at::Tensor inputs, target;
  double alpha = 0;
  int64_t seed = 0, step = 0;
  bool per_row = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("inputs", self.inputs);
    visit("target", self.target);
    visit.required("alpha", self.alpha);
    visit.keywords();
    visit.required("seed", self.seed);
    visit.required("step", self.step);
    visit("per_row", self.per_row);
  }
};

/// The results of the operators, which do not return the argument `target`.
struct MixResult : Mixed {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("inputs", self.inputs);
    visit("target2", self.target2);
    visit("mix", self.mix);
  }
};

}  // namespace shoestring::data
