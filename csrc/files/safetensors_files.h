#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <shoestring/files/safetensors.h>

namespace shoestring::files {

/// The tensors of one safetensors file or of a Hugging Face model folder. A folder holds either
/// model.safetensors or the shards that its model.safetensors.index.json lists. The constructor reads and
/// checks the header of every file but reads no tensor.
class SafetensorsFiles {
 public:
  explicit SafetensorsFiles(const std::string& path);

  /// Returns the names of all tensors, file by file, in the order in which their data is stored.
  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return where_.count(name) > 0; }
  /// Returns the file that holds the tensor `name`, which must exist.
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
