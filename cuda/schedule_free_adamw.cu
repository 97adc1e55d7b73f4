// An instance of the kernels in optimizer.h.

#include "kernels/schedule_free_adamw.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ScheduleFreeAdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
