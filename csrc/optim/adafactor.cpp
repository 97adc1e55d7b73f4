#include <shoestring/optim/rules.h>

#include "optim/factored_optimizer.h"

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Extra> second_moment(const Tensor& param) {
  return factored(param, "row_var", "col_var", "variance");
}

}  // namespace

const Rule& AdafactorOptions::rule() const {
  static const Rule bare{"Adafactor", "adafactor_", {}, second_moment};
  static const Rule mean{"Adafactor", "adafactor_", {{"exp_avg", true}}, second_moment};
  return beta1_ > 0 ? mean : bare;
}

std::vector<Field> AdafactorOptions::fields() {
  return {{"beta1", &beta1_, &kFraction},
          {"beta2_decay", &beta2_decay_, &kAtMostZero},
          {"eps", &eps_, &kAtLeastZero},
          {"d", &d_, &kAtLeastOne},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
