#pragma once

#include <ATen/core/Tensor.h>
#include <shoestring/safetensors.h>

#include <functional>
#include <string>
#include <vector>

namespace shoestring::files {

/// The key of the metadata under which a checksum is stored.
inline constexpr const char* kChecksum = "checksum";

/// Returns a checksum of names, dtypes, shapes, bytes and of the metadata without kChecksum, in 16
/// hexadecimal digits. Calls tensor_of for one tensor at a time. The order of the names does not matter.
std::string content_checksum(const Metadata& metadata, std::vector<std::string> names,
                             const std::function<at::Tensor(const std::string&)>& tensor_of);

/// Returns the checksum of the content of a file, which is read one tensor at a time.
std::string content_checksum(const SafetensorsFile& file);

}  // namespace shoestring::files
