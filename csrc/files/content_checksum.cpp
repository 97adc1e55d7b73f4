#include "files/content_checksum.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "core/checksum.h"

namespace shoestring::files {
namespace {

// A 64-bit hash of 32-bit checksums. Each step is a bijection of the hash, and of the checksum.
class Hash {
 public:
  void add(const void* data, int64_t size) {
    value_ = (value_ ^ checksum(data, size)) * 1099511628211U;  // the prime of the hash FNV-1a, an odd number
    value_ ^= value_ >> 32;
  }
  void add(const std::string& text) { add(text.data(), static_cast<int64_t>(text.size())); }
  std::string text() const {
    std::array<char, 17> digits{};
    std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(value_));
    return digits.data();
  }

 private:
  uint64_t value_ = 14695981039346656037U;
};

}  // namespace

std::string content_checksum(const Metadata& metadata, std::vector<std::string> names,
                             const std::function<at::Tensor(const std::string&)>& tensor_of) {
  Hash hash;
  for (const auto& [key, text] : metadata) {
    if (key == kChecksum) continue;
    hash.add(key);
    hash.add(text);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    const at::Tensor tensor = tensor_of(name).detach().cpu().contiguous();
    hash.add(name);
    hash.add(c10::toString(tensor.scalar_type()));
    hash.add(tensor.sizes().data(), tensor.dim() * static_cast<int64_t>(sizeof(int64_t)));
    hash.add(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
  return hash.text();
}

std::string content_checksum(const SafetensorsFile& file) {
  std::vector<std::string> names;
  for (const auto& entry : file.entries()) names.push_back(entry.name);
  return content_checksum(file.metadata(), std::move(names),
                          [&](const auto& name) { return file.load(name); });
}

}  // namespace shoestring::files
