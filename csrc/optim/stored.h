#pragma once

#include <map>
#include <optional>
#include <string>

#include <shoestring/safetensors.h>
#include <torch/optim/optimizer.h>

#include "optim/split_params.h"

namespace shoestring::optim::detail {

/// The state of an optimizer as tensors, and its class and the options of its groups as metadata of a
/// safetensors file. Tensors are called "<parameter group>.<index of the parameter in the group>.<name>". The
/// metadata has the keys:
/// - optimizer: the name of the class; "torch." begins those of LibTorch;
/// - format_version;
/// - groups: JSON, a list of {"size": number of parameters, "options": {...}}. Python may add "extra", in
/// which
///   learning rate schedulers keep their values.
struct Stored {
  TensorDict tensors;
  Metadata metadata;
  bool has_parts = false;  // whether states of parameters that are parts (split_params.h) are not whole
  std::map<std::string, SplitTensor> splits{};  // then, how processes split tensors
};

/// Returns the state of one of our optimizers, or of LibTorch's Adam, AdamW or SGD. The tensors share the
/// memory of the state. If processes have split the state, all of them must call it, and each gets a copy of
/// all of it. With `has_parts`, the state of parameters that are parts stays that of this process.
Stored store(const torch::optim::Optimizer& optimizer, bool has_parts = false);

/// Returns how processes split a tensor of Stored that has the shape `sizes` in one process; nothing if each
/// process has all of it.
std::optional<SplitTensor> split_of_stored(const torch::optim::Optimizer& optimizer, const std::string& name,
                                           at::IntArrayRef sizes);

/// Returns whether this process writes the files of an optimizer. If processes have split its state, only the
/// first one does.
bool writes(const torch::optim::Optimizer& optimizer);

/// Restores what store has returned, in C++ or in Python. `where` begins messages. Raises c10::Error before
/// anything has changed.
void restore(torch::optim::Optimizer& optimizer, const Stored& stored, const std::string& where);

}  // namespace shoestring::optim::detail
