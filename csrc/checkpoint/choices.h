#pragma once

#include <string>
#include <vector>

namespace shoestring::activations {

/// What a plan may do with a block's activations. Python asks for these, too (the operator
/// checkpoint_choices).
struct Choice {
  std::string name;
  bool recomputed;
  std::vector<std::string> keep;  // recomputed but for these
  bool offloaded;                 // what is saved leaves the device
};

/// Without and with offload. One that is offloaded comes behind the one that it is else like.
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
