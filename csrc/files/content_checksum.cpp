#include "files/content_checksum.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "core/checksum.h"

namespace shoestring::files {

// A 64-bit hash of 32-bit checksums. Each step is a bijection of the hash, and of the checksum.
void ContentChecksum::add(const void* data, int64_t size) {
  value_ = (value_ ^ checksum(data, size)) * 1099511628211U;  // the prime of the hash FNV-1a, an odd number
  value_ ^= value_ >> 32;
}

ContentChecksum::ContentChecksum(const Metadata& metadata) {
  for (const auto& [key, text] : metadata) {
    if (key == kChecksum) continue;
    add(key);
    add(text);
  }
}

void ContentChecksum::add(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor data = tensor.detach().cpu().contiguous();
  add(name);
  add(std::string(c10::toString(data.scalar_type())));
  add(data.sizes().data(), data.dim() * static_cast<int64_t>(sizeof(int64_t)));
  add(data.const_data_ptr(), static_cast<int64_t>(data.nbytes()));
}

std::string ContentChecksum::text() const {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(value_));
  return digits.data();
}

std::string content_checksum(const Metadata& metadata, std::vector<std::string> names,
                             const std::function<at::Tensor(const std::string&)>& tensor_of) {
  ContentChecksum sum(metadata);
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) sum.add(name, tensor_of(name));
  return sum.text();
}

std::string content_checksum(const SafetensorsFile& file) {
  std::vector<std::string> names;
  for (const auto& entry : file.entries()) names.push_back(entry.name);
  return content_checksum(file.metadata(), std::move(names),
                          [&](const auto& name) { return file.load(name); });
}

}  // namespace shoestring::files
