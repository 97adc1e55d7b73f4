// Instantiates the kernels of cuda/optim/optimizer.h for ema_.

#include "optim/ema_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::EmaRule>();

}  // namespace
}  // namespace shoestring::cuda
