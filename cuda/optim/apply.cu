// Instantiates the kernels of cuda/optim/optimizer.h for the operator apply_, which subtracts an update from
// the weights.

#include "optim/rules/apply_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ApplyRule>();

}  // namespace
}  // namespace shoestring::cuda
