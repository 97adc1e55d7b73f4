#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace shoestring::lora {

/// The metadata of an adapter's weights that holds the digest of their configuration.
constexpr const char* kDigest = "adapter_config_sha1";

/// The SHA-1 of the fields of adapter_config.json that change the computation. An option that is off counts
/// as one that is absent, and lists count as sets. Python's lora/config_digest.py computes the same.
std::string config_digest(const nlohmann::json& config);

}  // namespace shoestring::lora
