#pragma once

// PyTorch's own CUDA operators for attention. They are used for calls that they compute as attention()
// defines it.

#include "attention/attention.h"

namespace shoestring::attend {

enum class Library { kNone, kCudnn, kFlash };

/// Returns the PyTorch operator that computes the call, or kNone for our kernels. No other function decides
/// this.
Library library_for(const Call& call);

/// Computes forward with an operator of PyTorch. The strides of the output and lse are the same as those of
/// our kernels. Forward and backward may therefore use different implementations.
Result forward_library(Library library, const Call& call);
/// Computes backward with an operator of PyTorch, for calls without a gradient of lse.
Gradients backward_library(Library library, const Call& call, const Upstream& upstream);

}  // namespace shoestring::attend
