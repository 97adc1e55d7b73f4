// An instance of the kernels in optimizer.h.

#include "kernels/apply.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ApplyRule>();

}  // namespace
}  // namespace shoestring::cuda
