// An instance of the kernels in optimizer.h.

#include "kernels/adamw.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::AdamWRule>();

}  // namespace
}  // namespace shoestring::cuda
