// Instantiates the kernels of cuda/optim/optimizer.h for AdamW.

#include "optim/rules/adamw_rule.h"

#include "cuda/optim/optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::AdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
