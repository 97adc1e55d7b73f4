// An instance of the kernels in optimizer.h.

#include "optim/adamw_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::AdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
