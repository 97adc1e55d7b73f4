#pragma once

#include <map>
#include <optional>
#include <string>

#include <shoestring/files/safetensors.h>
#include <torch/optim/optimizer.h>

#include "files/safetensors_writer.h"
#include "optim/split/split_params.h"

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
  bool has_parts = false;  // whether tensors that processes have split are this process's parts
  std::map<std::string, SplitTensor> splits{};  // then, how processes split these tensors
};

/// Returns the state of one of our optimizers, or of LibTorch's Adam, AdamW or SGD. The tensors share the
/// memory of the state. If processes have split the state, each gets its part.
Stored store(const torch::optim::Optimizer& optimizer);

/// Returns the tensors of `stored`, with names that begin with `prefix`, for a file. `caller` and `path`
/// begin errors.
std::vector<files::Source> sources_of(const Stored& stored, const std::string& prefix,
                                      const std::string& caller, const std::string& path);

/// Returns whether processes have split the state of an optimizer.
bool is_split(const torch::optim::Optimizer& optimizer);

/// Returns whether this process writes the files of an optimizer. If processes have split its state, only the
/// first one does.
bool writes(const torch::optim::Optimizer& optimizer);

/// Restores what store has returned, in C++ or in Python. `where` begins messages. Raises c10::Error before
/// anything has changed.
void restore(torch::optim::Optimizer& optimizer, const Stored& stored, const std::string& where);

}  // namespace shoestring::optim::detail
