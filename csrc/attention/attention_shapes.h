#pragma once

// The shapes that attention takes besides those of its kernels: any number of dimensions, and sizes that
// broadcast.

#include <optional>

#include "attention/attention.h"

namespace shoestring::attend {

/// Gives the inputs of a call the shapes of the kernels, and gives the results the caller's dimensions.
class Shapes {
 public:
  /// Replaces the tensors of a call that is not packed: q, k and v by views (batch, heads, tokens, features),
  /// the bias by a view (batch, heads, queries, keys), and slopes of several dimensions by (batch, heads).
  /// Leading dimensions in front of the heads become one batch, which copies a tensor only if no view can
  /// merge its strides. Sizes that broadcast become strides of 0. A packed bias becomes (heads, queries,
  /// keys). PyTorch's operators do all of this, so autograd can record it. Arguments that have these shapes
  /// already stay as they are.
  explicit Shapes(Arguments& arguments);

  Result restore(Result result) const;

 private:
  // The sizes of lse for the caller. None: the results are as the caller expects them.
  std::optional<at::SymDimVector> rows_;
};

}  // namespace shoestring::attend
