// An instance of the kernels in optimizer.h.

#include "kernels/sgd.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::SGDRule>();

}  // namespace
}  // namespace shoestring::cuda
