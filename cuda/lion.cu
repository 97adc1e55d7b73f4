// An instance of the kernels in optimizer.h.

#include "kernels/lion.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::LionRule>();

}  // namespace
}  // namespace shoestring::cuda
