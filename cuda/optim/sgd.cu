// Instantiates the kernels of cuda/optim/optimizer.h for SGD.

#include "optim/rules/sgd_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::SGDRule>();

}  // namespace
}  // namespace shoestring::cuda
