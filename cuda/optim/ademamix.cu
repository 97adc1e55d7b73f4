// Instantiates the kernels of cuda/optim/optimizer.h for AdEMAMix.

#include "optim/rules/ademamix_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::AdEMAMixRule>();

}  // namespace
}  // namespace shoestring::cuda
