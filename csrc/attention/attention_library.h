#pragma once

// Computes attention with PyTorch's own CUDA operators, for calls in which they give the result that
// shoestring's attention() defines.

#include "attention/attention.h"

namespace shoestring::attend {

enum class Library { kNone, kCudnn, kFlash };

/// Decides which PyTorch operator computes the call; kNone means shoestring's own kernels. No other function
/// makes this decision.
Library library_for(const Call& call);

/// Computes attention's forward with an operator of PyTorch. The output and lse have the strides that
/// shoestring's kernels give them, so backward may use another implementation than forward.
Result forward_library(Library library, const Call& call);
/// Computes attention's backward with an operator of PyTorch. The call must have no gradient of lse.
Gradients backward_library(Library library, const Call& call, const Upstream& upstream);

}  // namespace shoestring::attend
