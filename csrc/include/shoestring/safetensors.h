#pragma once

#include <ATen/core/Tensor.h>
#include <shoestring/export.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace shoestring {

using TensorDict = torch::OrderedDict<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

/// A safetensors file, open for reading. The header is checked in full before any tensor is allocated: a
/// truncated or hostile file raises c10::Error. Tensors are read, not mapped: mapped pages would count as the
/// process's memory.
class SHOESTRING_API SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    int64_t begin, end;  // bytes, counted from the end of the header
  };

  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// The tensors, in the order of their bytes in the file.
  const std::vector<Entry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.count(name) > 0; }
  const std::string& path() const { return path_; }
  /// The entry `name`, which the file contains.
  const Entry& entry(const std::string& name) const;

  /// The tensor `name`, in fresh CPU memory.
  at::Tensor load(const std::string& name) const;
  /// The same into `out`, which has the tensor's shape and dtype, on any device: no second copy of it on the
  /// CPU.
  void load_into(const std::string& name, const at::Tensor& out) const;

 private:
  void read(const Entry& entry, const at::Tensor& out) const;

  std::string path_;
  int fd_ = -1;
  int64_t data_ = 0;  // where the tensors' bytes begin
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_;
  Metadata metadata_;
};

/// All tensors of a safetensors file, or of a Hugging Face model directory: its model.safetensors, or the
/// shards that its model.safetensors.index.json names.
SHOESTRING_API TensorDict load_safetensors(const std::string& path);

/// Writes `tensors` (dense, on any device) and `metadata` to the file `path`, replacing one that is there
/// only once the new one is complete and on disk. The bytes are those that the Python package safetensors
/// writes.
SHOESTRING_API void save_safetensors(const std::string& path, const TensorDict& tensors,
                                     const Metadata& metadata = {});

}  // namespace shoestring
