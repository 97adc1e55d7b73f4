#include <shoestring/optim/rules.h>

#include "optim/factored_optimizer.h"

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Extra> statistics(const Tensor& param) {
  auto all = factored(param, "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq");
  for (Extra& extra : factored(param, "exp_avg_res_row", "exp_avg_res_col", nullptr))
    all.push_back(std::move(extra));
  return all;
}

}  // namespace

const Rule& CAMEOptions::rule() const {
  static const Rule rule{"CAME", "came_", {{"exp_avg", true}}, statistics};
  return rule;
}

std::vector<Field> CAMEOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAboveZero},
          {"clip_threshold", &clip_threshold_, &kAboveZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

void CAMEOptions::check() const {
  const double beta1 = std::get<0>(betas_);
  expect(beta1 > 0, rule().name, "betas", "a first above 0, without which there is no instability", beta1);
}

}  // namespace shoestring::optim
