#pragma once

#include <ATen/core/Tensor.h>
#include <shoestring/files/safetensors.h>

#include <functional>
#include <string>
#include <vector>

namespace shoestring::files {

/// The key of the metadata under which a checksum is stored.
inline constexpr const char* kChecksum = "checksum";

/// A checksum of names, dtypes, shapes, bytes and of the metadata without kChecksum.
class ContentChecksum {
 public:
  explicit ContentChecksum(const Metadata& metadata);
  /// Adds a tensor. Names must be added in ascending order.
  void add(const std::string& name, const at::Tensor& tensor);
  /// Returns 16 hexadecimal digits.
  std::string text() const;

 private:
  void add(const void* data, int64_t size);
  void add(const std::string& text) { add(text.data(), static_cast<int64_t>(text.size())); }

  uint64_t value_ = 14695981039346656037U;
};

/// Returns the text of a ContentChecksum. Calls tensor_of for one tensor at a time. The order of the names
/// does not matter.
std::string content_checksum(const Metadata& metadata, std::vector<std::string> names,
                             const std::function<at::Tensor(const std::string&)>& tensor_of);

/// Returns the checksum of the content of a file, which is read one tensor at a time.
std::string content_checksum(const SafetensorsFile& file);

}  // namespace shoestring::files
