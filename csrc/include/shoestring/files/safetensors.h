#pragma once

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace shoestring {

using TensorDict = torch::OrderedDict<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

/// A safetensors file that is open for reading. The header is checked in full before any tensor is allocated,
/// so a truncated or malicious file raises c10::Error. Tensors are read and, but for map(), not
/// memory-mapped, because mapped pages would count as memory of the process.
class SHOESTRING_API SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    int64_t begin, end;  ///< begin and end of the tensor, in bytes after the end of the header
  };

  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// Returns the entries of all tensors, in the order of the tensors' bytes in the file.
  const std::vector<Entry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return index_.count(name) > 0; }
  const std::string& path() const { return path_; }
  /// Returns the entry of the tensor `name`, which the file must contain.
  const Entry& entry(const std::string& name) const;

  /// Loads the tensor `name` into newly allocated CPU memory.
  at::Tensor load(const std::string& name) const;
  /// Returns the tensor `name` as a mapping of the file, of which only the pages that are read are loaded,
  /// for a process that needs a part. Writing to it changes no file. The tensor may outlive this object.
  at::Tensor map(const std::string& name) const;
  /// Loads the elements [begin, end) of the tensor `name`, counted in the order of memory, as a vector.
  at::Tensor load_range(const std::string& name, int64_t begin, int64_t end) const;
  /// Loads the tensor `name` into `out`, which must have the tensor's shape and dtype and may be on any
  /// device. Makes no second copy of the whole tensor on the CPU.
  void load_into(const std::string& name, const at::Tensor& out) const;

 private:
  void read(const Entry& entry, const at::Tensor& out) const;

  std::string path_;
  int fd_ = -1;
  int64_t data_ = 0;  // offset of the first tensor's bytes in the file
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> index_;
  Metadata metadata_;
};

/// Loads all tensors of a safetensors file or of a Hugging Face model directory. A directory holds
/// model.safetensors, or the shards that its model.safetensors.index.json lists.
SHOESTRING_API TensorDict load_safetensors(const std::string& path);

/// Saves `tensors` (dense, on any device) and `metadata` to the file `path`. An existing file is replaced
/// only after the new file is complete and on disk. The bytes equal those that the Python package safetensors
/// writes.
SHOESTRING_API void save_safetensors(const std::string& path, const TensorDict& tensors,
                                     const Metadata& metadata = {});

}  // namespace shoestring
