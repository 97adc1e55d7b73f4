#pragma once

// PyTorch's own operators for attention on CUDA, for the calls that they can do as attention() defines them.

#include "attention/attention.h"

namespace shoestring::attend {

enum class Library { kNone, kCudnn, kFlash };

/// Which one takes the call; kNone: our kernels. The only place that decides.
Library library_for(const Call& call);

/// Results lie in memory as those of our kernels do, and lse is the same: forward and backward may be of
/// different kinds.
Result forward_library(Library library, const Call& call);
/// Without the gradient of lse.
Gradients backward_library(Library library, const Call& call, const Upstream& upstream);

}  // namespace shoestring::attend
