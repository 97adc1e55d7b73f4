#include "optim/apply_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct Apply {
  using Rule = kernels::ApplyRule;
  static constexpr const char* kNames[] = {nullptr};
  static const auto& table() { return cpu::apply(); }

  static kernels::ApplyOptions options(const Call& call) { return {call.options()}; }
};

const RegisteredRule<Apply> kApplyRegistered("_apply_");

}  // namespace
}  // namespace shoestring::optim::ops
