#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace shoestring::lora {

/// Metadata key in adapter_model.safetensors that holds the digest of adapter_config.json.
constexpr const char* kDigest = "adapter_config_sha1";

/// Returns the SHA-1 of the fields of adapter_config.json that change what the adapter computes. An option
/// that is off has the same digest as an absent one, and the order of a list's items does not matter, because
/// PEFT writes them in any order.
std::string config_digest(const nlohmann::json& config);

}  // namespace shoestring::lora
