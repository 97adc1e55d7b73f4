#pragma once

#include <string>

#include <shoestring/files/safetensors.h>

#include "adapters/peft_config.h"

namespace shoestring::lora {

/// Writes the two files of an adapter into a folder, which is made if there is none. Each replaces the former
/// file only after it is on disk. `metadata` is added to that of the weights.
void write_adapter(const std::string& directory, const TensorDict& tensors, const Json& config,
                   Metadata metadata = {});

/// Raises ValueError if the weights in `file` were saved with another configuration than the one with this
/// config_digest().
void check_digest(const SafetensorsFile& file, const std::string& digest);

}  // namespace shoestring::lora
