#include "optim/apply_rule.h"

#include "optim/optimizer.h"

namespace shoestring {
namespace {

struct Apply {
  using Rule = kernels::ApplyRule;
  static constexpr const char* kNames[] = {nullptr};
  static const auto& table() { return cpu::apply(); }

  static kernels::ApplyOptions options(const optimizer::Call& call) { return {call.options()}; }
};

const optimizer::RegisteredRule<Apply> kApplyRegistered("apply_");

}  // namespace
}  // namespace shoestring
