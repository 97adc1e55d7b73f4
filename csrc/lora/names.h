#pragma once

#include <string>
#include <utility>
#include <vector>

#include <shoestring/nn.h>

namespace shoestring::lora {

/// A target is a name, or what a name ends with after a dot.
bool matches(const std::string& name, const std::vector<std::string>& targets);

/// The shoestring::nn::Linear layers by name, in the order of modules; the module itself has the name "".
std::vector<std::pair<std::string, nn::LinearImpl*>> linears(const torch::nn::Module& module);

inline void check_adapter(const char* caller, const nn::AdapterOptions& options) {
  TORCH_CHECK_VALUE(options.rank() >= 1, caller, ": rank: expected at least 1, received ", options.rank());
  TORCH_CHECK_VALUE(options.dropout() >= 0 && options.dropout() < 1, caller,
                    ": dropout: expected a probability in [0, 1), received ", options.dropout());
}

}  // namespace shoestring::lora
