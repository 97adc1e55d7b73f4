// Instantiates the kernels of cuda/optim/optimizer.h for Lion.

#include "optim/rules/lion_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::LionRule>();

}  // namespace
}  // namespace shoestring::cuda
