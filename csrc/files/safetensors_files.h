#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <shoestring/safetensors.h>

namespace shoestring::files {

/// The tensors of one safetensors file, or of a Hugging Face model directory: its model.safetensors, or the
/// shards that its model.safetensors.index.json names. Every header is read and checked at once, no tensor.
class SafetensorsFiles {
 public:
  explicit SafetensorsFiles(const std::string& path);

  /// File by file, in the order of their bytes.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return where_.count(name) > 0; }
  /// The file that holds `name`, which is there.
  const SafetensorsFile& file(const std::string& name) const { return *where_.at(name); }
  const SafetensorsFile::Entry& entry(const std::string& name) const { return file(name).entry(name); }

 private:
  void open_file(const std::string& path);
  void open_shards(const std::string& folder, const std::string& index);

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::string> names_;
  std::map<std::string, const SafetensorsFile*> where_;
};

}  // namespace shoestring::files
