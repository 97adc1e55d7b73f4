// Instantiates the kernels of cuda/optim/optimizer.h for the operator ema_, an exponential moving average of
// weights.

#include "optim/rules/ema_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::EmaRule>();

}  // namespace
}  // namespace shoestring::cuda
