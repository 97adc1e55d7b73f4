#include <torch/library.h>

#include "ops/linear_distillation.h"

namespace shoestring {
namespace {

distillation::Result rows(const distillation::Problem&) {
  TORCH_CHECK(false, distillation::kOp,
              ": hidden: expected a CPU tensor, received CUDA, for which there is no kernel yet; use "
              "shoestring.ops.linear_distillation_reference there");
}

TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("linear_distillation_rows", torch::CppFunction::makeFromBoxedFunction<&distillation::boxed<rows>>());
}

}  // namespace
}  // namespace shoestring
