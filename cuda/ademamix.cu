// An instance of the kernels in optimizer.h.

#include "kernels/ademamix.h"

#include "optimizer.h"

namespace shoestring::cuda {
namespace {

const bool kProvided = provide_rule<kernels::AdEMAMixRule>();

}  // namespace
}  // namespace shoestring::cuda
