// An instance of the kernels in optimizer.h.

#include "kernels/ema.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::EmaRule>();

}  // namespace
}  // namespace shoestring::cuda
