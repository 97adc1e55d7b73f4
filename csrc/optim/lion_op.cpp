#include "optim/lion_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct Lion {
  using Rule = kernels::LionRule;
  static constexpr const char* kNames[] = {"exp_avg"};
  static const auto& table() { return cpu::lion(); }

  static kernels::LionOptions options(const Call& call) {
    return {call.options(), call.fraction("beta1"), call.fraction("beta2")};
  }
};

const RegisteredRule<Lion> kLionRegistered("lion_");

}  // namespace
}  // namespace shoestring::optim::ops
