// Instantiates the kernels of cuda/optim/optimizer.h for apply_.

#include "optim/apply_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::ApplyRule>();

}  // namespace
}  // namespace shoestring::cuda
