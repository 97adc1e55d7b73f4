// An instance of the kernels in optimizer.h.

#include "optim/sgd_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::SGDRule>();

}  // namespace
}  // namespace shoestring::cuda
