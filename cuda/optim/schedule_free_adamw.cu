// An instance of the kernels in optimizer.h.

#include "optim/schedule_free_adamw_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ScheduleFreeAdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
