#pragma once

#include <string>
#include <vector>

namespace shoestring::activations {

/// One way to treat the activations of a block: keep, recompute or offload them. Python reads the list of
/// choices through the operator _checkpoint_choices.
struct Choice {
  std::string name;
  bool recomputed;
  // Names of operators, or of groups of operators, whose results are stored although the block is recomputed.
  std::vector<std::string> keep;
  bool offloaded;  // whether the tensors that autograd saves are offloaded
};

/// Returns all ways to treat a block's activations. The ways that offload come last. Each of them equals an
/// earlier one, except that it offloads.
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
