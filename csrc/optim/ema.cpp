#include "optim/ema_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct Ema {
  using Rule = kernels::EmaRule;
  static constexpr const char* kNames[] = {"exp_avg"};
  static const auto& table() { return cpu::ema(); }

  static kernels::EmaOptions options(const Call& call) {
    return {call.options(), call.fraction("beta"), call["nesterov"].toBool()};
  }
};

const RegisteredRule<Ema> kEmaRegistered("_ema_");

}  // namespace
}  // namespace shoestring::optim::ops
