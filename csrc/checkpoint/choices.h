#pragma once

#include <string>
#include <vector>

namespace shoestring::activations {

/// One way to treat the activations of a block. Python reads the list through the operator
/// checkpoint_choices.
struct Choice {
  std::string name;
  bool recomputed;
  // Operators and groups whose results are stored, although the block is recomputed.
  std::vector<std::string> keep;
  bool offloaded;  // what autograd saves leaves the device
};

/// Returns all choices. Those that offload come last; each equals an earlier choice except for offloading.
inline const std::vector<Choice>& choices() {
  static const std::vector<Choice> all{
      {"keep", false, {}, false},
      {"recompute", true, {}, false},
      {"keep attention", true, {"attention"}, false},
      {"keep attention and products", true, {"attention", "products"}, false},
      {"offload", false, {}, true},
      {"recompute, input offloaded", true, {}, true}};
  return all;
}

}  // namespace shoestring::activations
