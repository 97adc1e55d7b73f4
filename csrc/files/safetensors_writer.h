#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <shoestring/files/safetensors.h>

#include "files/atomic_file.h"

namespace shoestring::files {

/// Name, dtype and shape of a tensor that is written.
struct TensorInfo {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// Returns name, dtype and shape of a tensor. Raises ValueError if it is undefined or not dense.
TensorInfo info_of(const std::string& caller, const std::string& path, const std::string& name,
                   const at::Tensor& tensor);

/// Returns the tensors in the order of the format: by dtype, then by name. Raises ValueError if safetensors
/// cannot hold a name or a dtype.
std::vector<TensorInfo> sorted(const std::string& caller, const std::string& path,
                               std::vector<TensorInfo> tensors);

/// Writes a safetensors file tensor by tensor, so that no more than one tensor has to be in memory. The bytes
/// equal those that the Python package safetensors writes. The file appears under its name at commit();
/// without commit(), nothing is written. Error messages begin with `caller` and the path.
class SafetensorsWriter {
 public:
  /// Writes the header. Raises ValueError if safetensors cannot hold a name, a dtype or the metadata.
  SafetensorsWriter(const std::string& caller, const std::string& path, std::vector<TensorInfo> tensors,
                    const Metadata& metadata);

  /// Returns the tensors in the order in which write() must be called.
  const std::vector<TensorInfo>& order() const { return order_; }
  /// Writes the data of the next tensor, which may be on any device.
  void write(const at::Tensor& tensor);
  /// Completes the file, after all tensors have been written.
  void commit();

 private:
  std::vector<TensorInfo> order_;
  size_t written_ = 0;
  AtomicFile file_;
};

/// A tensor of a file. If processes have parts of it (is_split), all of them must call `whole`.
struct Source {
  TensorInfo info;
  std::function<at::Tensor()> whole;
  bool is_split = false;
};

/// Returns the checksum of the content that save_gathered() writes. All processes must call it.
std::string checksum_of(const std::vector<Source>& sources, const Metadata& metadata, bool writes);

/// Writes a file of tensors, of which processes may have parts: each has one whole tensor at a time.
/// Processes that do not write give their parts, also after an error of the process that does.
void save_gathered(const std::string& caller, const std::string& path, const std::vector<Source>& sources,
                   const Metadata& metadata, bool writes);

}  // namespace shoestring::files
