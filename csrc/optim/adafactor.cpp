#include <shoestring/optim.h>

#include "optim/rule.h"

namespace shoestring::optim {

using namespace detail;

namespace {

// A matrix's second moment is kept as that of its rows and columns; what a parameter does not have is empty.
std::vector<Extra> second_moment(const Tensor& param) {
  std::vector<int64_t> row = param.sizes().vec(), col = row;
  if (param.dim() < 2) return {{"row_var", {0}}, {"col_var", {0}}, {"variance", row}};
  row.end()[-1] = 1;
  col.end()[-2] = 1;
  return {{"row_var", row}, {"col_var", col}, {"variance", {0}}};
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
