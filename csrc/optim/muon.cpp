#include <shoestring/optim/rules.h>

#include "optim/rule.h"

namespace shoestring::optim {

using namespace detail;

const Rule& MuonOptions::rule() const {
  static const Rule rule{
      "Muon", "muon_", {{"momentum_buffer", true}}, nullptr, /*takes_matrices_alone=*/true};
  return rule;
}

std::vector<Field> MuonOptions::fields() {
  return {{"momentum", &momentum_, &kFraction},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"nesterov", &nesterov_},
          {"ns_coefficients", &ns_coefficients_},
          {"eps", &eps_, &kAtLeastZero},
          {"ns_steps", &ns_steps_},
          {"adjust_lr_fn", &adjust_lr_fn_}};
}

void MuonOptions::check() const {
  expect(ns_coefficients_.size() == 3, rule().name, "ns_coefficients", "3 numbers", ns_coefficients_.size());
  expect(ns_steps_ > 0 && ns_steps_ < 100, rule().name, "ns_steps", "a whole number from 1 to 99", ns_steps_);
  const std::string adjust = adjust_lr_fn_.value_or("original");
  expect(adjust == "original" || adjust == "match_rms_adamw", rule().name, "adjust_lr_fn",
         "none, \"original\" or \"match_rms_adamw\"", "\"" + adjust + "\"");
}

}  // namespace shoestring::optim
