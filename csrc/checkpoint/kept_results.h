#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace shoestring::activations {

/// Results that a checkpoint keeps whatever its options are: those of the calls of kept_results in the first
/// run of the checkpointed function, in their order.
using KeptResults = std::vector<std::vector<at::Tensor>>;

/// A run of a checkpointed function on this thread, which lasts until the destructor. The first run appends
/// to `kept`, and a second run takes the results from there.
class KeptResultsRun {
 public:
  KeptResultsRun(KeptResults& kept, bool is_second);
  ~KeptResultsRun();
  KeptResultsRun(const KeptResultsRun&) = delete;
  KeptResultsRun& operator=(const KeptResultsRun&) = delete;
};

/// Returns compute(), tensors that are not part of an autograd graph. Every checkpoint around the call keeps
/// copies of them, and its second run returns these without calling compute. Use it for choices, such as the
/// experts of a token, which can differ if a second run rounds in another way.
std::vector<at::Tensor> kept_results(const std::function<std::vector<at::Tensor>()>& compute);

}  // namespace shoestring::activations
