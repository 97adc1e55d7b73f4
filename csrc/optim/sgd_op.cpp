#include "optim/sgd_rule.h"

#include <cmath>

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct SGD {
  using Rule = kernels::SGDRule;
  static constexpr const char* kNames[] = {"momentum_buffer"};
  static const auto& table() { return cpu::sgd(); }

  static kernels::SGDOptions options(const Call& call) {
    const double momentum = call.number("momentum"), dampening = call.number("dampening");
    const bool nesterov = call["nesterov"].toBool();
    TORCH_CHECK(momentum > 0, call.op, ": momentum: expected a number above 0, received ", momentum,
                "; without momentum there is no state to keep: use torch.optim.SGD");
    TORCH_CHECK(std::isfinite(dampening), call.op, ": dampening: expected a finite number, received ",
                dampening);
    TORCH_CHECK(!nesterov || dampening == 0, call.op, ": dampening: expected 0 with nesterov=True, received ",
                dampening);
    return {call.options(), momentum, dampening, nesterov};
  }
};

const RegisteredRule<SGD> kSGDRegistered("sgd_");

}  // namespace
}  // namespace shoestring::optim::ops
